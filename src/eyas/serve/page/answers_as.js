// How answers are shown: as text with its Markdown, or painted by origin. The choice is kept.

const NAME = "eyas-answers";
const CHOICES = ["text", "painted"];

export function setUpAnswersAs(group) {
  const inputs = [...group.querySelectorAll("input")];
  const apply = (choice) => {
    document.body.dataset.answers = choice;
    for (const input of inputs) input.checked = input.value === choice;
  };
  group.addEventListener("change", (event) => {
    apply(event.target.value);
    try {
      localStorage.setItem(NAME, event.target.value);
    } catch {
      // storage may be forbidden; then the choice holds until a reload
    }
  });
  apply(kept());
}

function kept() {
  try {
    const choice = localStorage.getItem(NAME);
    return CHOICES.includes(choice) ? choice : "text";
  } catch {
    return "text";
  }
}
