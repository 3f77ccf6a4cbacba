// Sorts and filters the table of pages. Without this script all pages are shown in their original order.
const table = document.getElementById("table"), body = table.tBodies[0], rows = [...body.rows];
const find = document.getElementById("find"), check = document.getElementById("check"), sort = document.getElementById("sort");
const shown = document.getElementById("shown"), picks = [...document.querySelectorAll(".pick")];
document.querySelector(".tools").hidden = false;

const text = new Map(rows.map((row) => [row, row.querySelector(".page").textContent.toLowerCase()]));
const marks = new Map(rows.map((row) => [row, new Set(row.dataset.checks.split(" "))]));

function filter() {
  const query = find.value.trim().toLowerCase();
  let number = 0;
  for (const row of rows) {
    row.hidden = !(text.get(row).includes(query) && (!check.value || marks.get(row).has(check.value)));
    number += !row.hidden;
  }
  shown.textContent = `${number.toLocaleString("en")} of ${rows.length.toLocaleString("en")} pages`;
  for (const pick of picks) pick.setAttribute("aria-pressed", String(pick.dataset.check === check.value));
}

// Names sort ascending first, numbers descending; pages without a number come last.
function sortBy(name, up) {
  const of = (row) => {
    const cell = row.querySelector(`td.${name}`);
    if (cell.dataset.value === undefined) return text.get(row).trim();
    return cell.dataset.value === "" ? null : Number(cell.dataset.value);
  };
  const keys = new Map(rows.map((row, place) => [row, { key: of(row), place }]));
  const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0) * (up ? 1 : -1);
  const sorted = [...rows].sort((one, other) => {
    const a = keys.get(one), b = keys.get(other);
    if (a.key === null || b.key === null) return (a.key === null) - (b.key === null) || a.place - b.place;
    return compare(a.key, b.key) || a.place - b.place;
  });
  body.append(...sorted);
  for (const head of table.tHead.querySelectorAll("[aria-sort]"))
    head.setAttribute("aria-sort", head.classList.contains(name) ? (up ? "ascending" : "descending") : "none");
  sort.value = name;
}

find.addEventListener("input", filter);
check.addEventListener("change", filter);
sort.addEventListener("change", () => sortBy(sort.value, sort.value === "page"));
for (const button of table.tHead.querySelectorAll("button")) {
  button.addEventListener("click", () => {
    const now = button.parentElement.getAttribute("aria-sort"), name = button.dataset.sort;
    sortBy(name, now === "none" ? name === "page" : now === "descending");
  });
}
for (const pick of picks) {
  pick.addEventListener("click", () => {
    check.value = check.value === pick.dataset.check ? "" : pick.dataset.check;
    filter();
    if (check.value) document.getElementById("pages").scrollIntoView({ behavior: "smooth" });
  });
}
sort.value = sort.querySelector('[value="score"]') ? "score" : "failed";
filter();
