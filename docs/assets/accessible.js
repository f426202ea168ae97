// What material leaves without a name.
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
document.querySelectorAll(".md-typeset pre").forEach((each) => (each.tabIndex = 0));  // they scroll, see extra.css
