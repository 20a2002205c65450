// Light, dark, or as the system has it. Loaded before anything is drawn, so that nothing flashes.

const NAME = "eyas-theme";
const CHOICES = ["auto", "light", "dark"];

function chosen() {
  try {
    const kept = localStorage.getItem(NAME);
    return CHOICES.includes(kept) ? kept : "auto";
  } catch {
    return "auto"; // storage may be forbidden
  }
}

function apply(choice) {
  if (choice === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
}

export function setUpTheme(button) {
  const show = () => (button.textContent = `Theme: ${chosen()}`);
  button.addEventListener("click", () => {
    const next = CHOICES[(CHOICES.indexOf(chosen()) + 1) % CHOICES.length];
    try {
      localStorage.setItem(NAME, next);
    } catch {
      return;
    }
    apply(next);
    show();
  });
  show();
}

apply(chosen());
