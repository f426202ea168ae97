"use strict";
// Sorts a table by a column: numbers before words, empty cells last, the other way round at the second press.
function sortBy(table, place, ascending) {
  const body = table.tBodies[0];
  const key = (row) => row.cells[place].dataset.key;
  const rows = Array.from(body.rows).map((row, order) => ({ row, order, key: key(row) }));
  rows.sort((a, b) => {
    if (a.key === "" || b.key === "") return (a.key === "") - (b.key === "") || a.order - b.order;
    const numbers = [Number(a.key), Number(b.key)];
    const both = !numbers.some(Number.isNaN);
    const found = both ? numbers[0] - numbers[1] : a.key.localeCompare(b.key, "en", { numeric: true });
    return (ascending ? found : -found) || a.order - b.order;
  });
  rows.forEach(({ row }) => body.append(row));
}

document.querySelectorAll("table.sortable").forEach((table) => {
  const heads = Array.from(table.tHead.rows[0].cells);
  heads.forEach((head, place) => {
    head.querySelector("button").addEventListener("click", () => {
      const ascending = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      sortBy(table, place, ascending);
    });
  });
});

// Shows the rows that hold every word of the filter.
document.querySelectorAll("input[data-filters]").forEach((input) => {
  const table = document.getElementById(input.dataset.filters);
  const shown = document.getElementById(input.dataset.filters.replace(/^t-/, "n-"));
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = Array.from(table.tBodies[0].rows);
    rows.forEach((row) => {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    });
    const left = rows.filter((row) => !row.hidden).length;
    shown.textContent = left === rows.length ? `${rows.length} rows` : `${left} of ${rows.length} rows`;
  });
});
