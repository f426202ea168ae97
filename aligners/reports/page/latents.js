"use strict";
// Draws the latents that the search, the filters and the order choose, some at a time.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const by = (id) => document.getElementById(id);
  const [PLACE, LATENT, VERDICT, NUMBERS, TOKENS, CONTEXTS] = [0, 1, 2, 3, 4, 5];
  let chosen = [];
  let drawn = 0;

  function element(name, kind, text) {
    const made = document.createElement(name);
    if (kind) made.className = kind;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function offer(id, names) {
    names.forEach((name, place) => {
      const option = element("option", "", name);
      option.value = place;
      by(id).append(option);
    });
  }

  // The tokens of a context: what each reads, its level, and whether it is the row itself.
  function around([text, place, , levels]) {
    const rows = data.texts[text];
    const found = [];
    for (let off = -data.around; off <= data.around; off += 1) {
      const row = place + off;
      if (row >= 0 && row < rows.length) {
        const level = Number(levels[off + data.around]);
        found.push({ reads: data.strings[rows[row]], level, own: off === 0 });
      }
    }
    return found;
  }

  const texts = new Map(); // what of a latent is searched, made when it is first asked for
  function searched(latent) {
    if (!texts.has(latent)) {
      const tokens = latent[TOKENS].map(([token]) => data.strings[token].trim());
      const read = latent[CONTEXTS].map((each) => around(each).map((token) => token.reads).join(""));
      texts.set(latent, [...tokens, ...read].join("\n").toLowerCase());
    }
    return texts.get(latent);
  }

  function digits(value) {
    if (value === null) return "none";
    if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(1);
    return String(Number(value.toPrecision(3)));
  }

  // Line ends and other white space of a token, which would not show.
  function visible(reads) {
    return reads.replace(/\n/g, "↵").replace(/\t/g, "⇥");
  }

  function context(each) {
    const line = element("li");
    line.append(element("span", "from", `text ${data.numbers[each[0]]} · ${digits(each[2])}`));
    around(each).forEach(({ reads, level, own }) => {
      const token = element("span", own ? "token own" : "token", visible(reads));
      if (level) token.style.background = `rgba(var(--shade), ${(0.07 * level).toFixed(2)})`;
      line.append(token);
    });
    return line;
  }

  function card(latent) {
    const made = element("article", "latent");
    const heading = element("h3", "", `Latent ${latent[LATENT]} · site ${data.sites[latent[PLACE]]}`);
    heading.append(element("span", "verdict", data.verdicts[latent[VERDICT]]));
    const numbers = element("dl", "numbers");
    data.columns.forEach((column, place) => {
      const pair = element("div");
      pair.append(element("dt", "", column), element("dd", "", digits(latent[NUMBERS][place])));
      numbers.append(pair);
    });
    const top = latent[TOKENS].map(([token, share]) => {
      return `${visible(data.strings[token]).trim() || "␣"} ${Math.round(100 * share)}%`;
    });
    const contexts = element("ol", "contexts");
    contexts.append(...latent[CONTEXTS].map(context));
    made.append(heading, numbers, element("p", "top", top.length ? `Top tokens: ${top.join(", ")}` : ""), contexts);
    return made;
  }

  function draw() {
    const next = chosen.slice(drawn, drawn + data.drawn);
    by("list").append(...next.map(card));
    drawn += next.length;
    by("more").hidden = drawn === chosen.length;
    const count = (number) => number.toLocaleString("en");
    by("found").textContent = `${count(drawn)} shown of ${count(chosen.length)} found, ${count(data.latents.length)} in all`;
  }

  function choose() {
    const wanted = by("search").value.toLowerCase();
    const named = /^\s*latent\s+(\d+)\s*$/.exec(wanted);
    const words = wanted.split(/\s+/).filter(Boolean);
    const [verdict, site, column] = ["verdict", "site", "sort"].map((id) => by(id).value);
    chosen = data.latents.filter((latent) => {
      if (verdict !== "" && latent[VERDICT] !== Number(verdict)) return false;
      if (site !== "" && latent[PLACE] !== Number(site)) return false;
      if (named) return latent[LATENT] === Number(named[1]);
      return words.every((word) => searched(latent).includes(word));
    });
    const sign = by("rising").checked ? 1 : -1;
    if (column !== "") {
      const key = (latent) => latent[NUMBERS][Number(column)];
      chosen.sort((a, b) => {
        if (key(a) === null || key(b) === null) return (key(a) === null) - (key(b) === null);
        return sign * (key(a) - key(b));
      });
    } else if (sign === 1) {
      chosen.reverse();
    }
    drawn = 0;
    by("list").replaceChildren();
    draw();
  }

  offer("verdict", data.verdicts);
  offer("site", data.sites);
  offer("sort", data.columns);
  let waiting = 0;
  by("search").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(choose, 150);
  });
  ["verdict", "site", "sort", "rising"].forEach((id) => by(id).addEventListener("change", choose));
  by("choose").addEventListener("submit", (event) => event.preventDefault());
  by("more").addEventListener("click", draw);
  choose();
})();
