// What material leaves without a name, or out of the keyboard's reach: code and wide tables scroll on their own.
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
addEventListener("load", () => {
  document.querySelectorAll(".md-typeset pre, .md-typeset__scrollwrap").forEach((each) => (each.tabIndex = 0));
});
