"""Which drafts of a corpus's answers would hit, for several drafters and one run of the target.

Shapes: S depths, M teacher rows.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from eyas.drafter.model import Drafter
from eyas.train.batch import TrainingBatch
from eyas.train.corpus.corpus import Corpus
from eyas.train.epochs import CorpusPacks
from eyas.train.features import FeatureSource
from eyas.train.forward_loss import forward_loss
from eyas.train.loss import LOSSES


@torch.no_grad()
def hits_of_corpus(
    drafters: Mapping[str, Drafter],
    layer_ids: Mapping[str, Sequence[int]],
    source: FeatureSource,
    corpus: Corpus,
    *,
    depths: int,
    pack_length: int,
    chunk: int,
    device: torch.device,
) -> Iterator[tuple[TrainingBatch, dict[str, Tensor]]]:
    """Pack by pack, what of each drafter hits at every depth [S, M], on the host.

    The target runs once for all drafters and each drafter is unrolled once, to the deepest depth: the first k depths
    of that are what drafting k tokens does. Documents longer than `pack_length` get a pack of their own.
    """
    # Made once: the source keeps the target's head over each of them.
    kept = {name: drafter.vocab().target_ids_W for name, drafter in drafters.items()}
    length = max(pack_length, corpus.longest)
    packs = CorpusPacks(corpus=corpus, length=length, seed=0, device=device, padded=False)
    for batch in (planned.build() for planned in packs.epoch(0)):
        features = source(batch)
        yield (
            batch,
            {
                name: forward_loss(
                    drafter,
                    batch,
                    features,
                    target_ids_W=kept[name],
                    layer_ids=layer_ids[name],
                    weights=[1.0] * depths,
                    row_loss=LOSSES["total_variation"],
                    chunk=chunk,
                ).hit_SM.cpu()
                for name, drafter in drafters.items()
            },
        )
