// Shows the values under the pointer. The page is complete without it.
for (const svg of document.querySelectorAll("svg[data-plot]")) {
  const plot = JSON.parse(svg.dataset.plot), cursor = svg.querySelector(".cursor");
  const lines = [...svg.querySelectorAll(".series")].map((line) => JSON.parse(line.dataset.values));
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  svg.parentNode.append(tip);
  const nearest = (sorted, x) => {
    let low = 0, high = sorted.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - sorted[low - 1] < sorted[low] - x ? low - 1 : low;
  };
  const show = (event) => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const part = ((event.clientX - box.left) * scale - plot.left) / (plot.right - plot.left);
    if (part < -0.02 || part > 1.02) return hide();
    const wanted = plot.x[0] + part * (plot.x[1] - plot.x[0]);
    const found = lines.map((line) => nearest(line.x, wanted));
    const at = lines.map((line, i) => line.x[found[i]]).reduce((a, b) => Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a);
    const place = plot.left + (at - plot.x[0]) / (plot.x[1] - plot.x[0]) * (plot.right - plot.left);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.setAttribute("visibility", "visible");
    const said = lines.map((line, i) => {
      const x = line.x[found[i]], away = x === at ? "" : ` (${plot.name} ${x.toLocaleString("en")})`;
      return `${line.name} ${line.y[found[i]].toLocaleString("en", { maximumSignificantDigits: 5 })}${plot.unit ? " " + plot.unit : ""}${away}`;
    });
    tip.textContent = [`${plot.name} ${at.toLocaleString("en")}`, ...said].join("\n");
    tip.hidden = false;
    const card = svg.parentNode.getBoundingClientRect();
    const left = box.left - card.left + place / scale + 12;
    tip.style.left = `${left + tip.offsetWidth > card.width ? left - tip.offsetWidth - 24 : left}px`;
    tip.style.top = `${Math.max(event.clientY - card.top - tip.offsetHeight - 8, 0)}px`;
  };
  const hide = () => {
    tip.hidden = true;
    cursor.setAttribute("visibility", "hidden");
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerleave", hide);
}
