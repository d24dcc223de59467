// Charts from the tables below them, questions before actions, and keys.
"use strict";
(() => {
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const charts = new Map();

  const bytes = (value) => {
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (Math.abs(value) < 1024) return `${+value.toPrecision(3)} ${unit}`;
      value /= 1024;
    }
    return `${+value.toPrecision(3)} TiB`;
  };
  const seconds = (value) =>
    value === 0 ? "0" : value < 1 ? `${+(value * 1000).toPrecision(3)} ms` : value < 120 ? `${+value.toPrecision(3)} s` : `${+(value / 60).toPrecision(3)} min`;
  // Marks of a binary axis are at powers of two.
  const binary = Array.from({ length: 50 }, (_, power) => 2 ** power);
  const pad = (number) => String(number).padStart(2, "0");
  const times = (_, marks) => {
    const days = marks.length > 1 && marks.at(-1) - marks[0] > 86400;
    const fine = marks.length > 1 && marks[1] - marks[0] < 60;
    return marks.map((mark) => {
      const at = new Date(mark * 1000);
      const clock = `${pad(at.getHours())}:${pad(at.getMinutes())}${fine ? `:${pad(at.getSeconds())}` : ""}`;
      return days ? `${pad(at.getMonth() + 1)}-${pad(at.getDate())} ${clock}` : clock;
    });
  };
  const formats = { B: bytes, s: seconds, "×": (value) => `${+value.toPrecision(3)} ×` };

  // Columns of numbers: the time, then one for each series; a cell without data-value is a gap.
  const read = (table) => {
    const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim());
    const rows = [...table.tBodies[0].rows].map((row) =>
      [...row.cells].map((cell) => (cell.dataset.value === undefined ? null : Number(cell.dataset.value))),
    );
    const columns = names.map((_, at) => rows.map((row) => row[at] ?? null));
    const used = columns.map((column, at) => at === 0 || column.some((value) => value));
    return { names: names.filter((_, at) => used[at]), columns: columns.filter((_, at) => used[at]) };
  };

  const stacked = (columns) => {
    const sums = columns[0].map(() => 0);
    return columns.slice(1).map((column) => column.map((value, at) => (sums[at] += value ?? 0)));
  };

  const draw = (plot) => {
    charts.get(plot)?.destroy();
    plot.replaceChildren();
    const table = document.getElementById(plot.dataset.from);
    const { names, columns } = read(table);
    const format = formats[plot.dataset.unit];
    const stack = plot.dataset.kind === "stack";
    const shown = stack ? stacked(columns) : columns.slice(1);
    const axis = { stroke: css("--muted"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const series = names.slice(1).map((name, at) => ({
      label: name,
      stroke: css(`--c${(at % 6) + 1}`),
      fill: stack ? css(`--c${(at % 6) + 1}`) : undefined,
      width: stack ? 0 : 1.75,
      points: { show: !stack && columns[0].length < 40, size: 5 },
      paths: stack ? uPlot.paths.bars({ size: [0.7, 28, 4] }) : undefined,
      value: (_, __, ___, index) => (index === null || columns[at + 1][index] === null ? "–" : format(columns[at + 1][index])),
    }));
    // A stack is drawn from its top, so that each sum covers the one above it.
    const order = series.map((_, at) => at);
    if (stack) order.reverse();
    const options = {
      width: plot.clientWidth,
      height: 180,
      cursor: { sync: { key: "icecore" }, y: false, drag: { x: true, y: false } },
      legend: { live: true },
      scales: {
        x: { range: (_, low, high) => { const room = stack ? (high - low || 60) * 0.04 : 0; return [low - room, high + room]; } },
        y: { range: (_, low, high) => [0, (high || 1) * 1.08] },
      },
      axes: [
        { ...axis, space: 70, size: 28, values: times },
        { ...axis, size: 64, values: (_, marks) => marks.map(format), ...(plot.dataset.unit === "B" ? { incrs: binary } : {}) },
      ],
      series: [{ value: (_, at) => (at === null ? "–" : times(null, [at, at + 1])[0]) }, ...order.map((at) => series[at])],
    };
    charts.set(plot, new uPlot(options, [columns[0], ...order.map((at) => shown[at])], plot));
  };

  const drawAll = () => document.querySelectorAll(".plot[data-from]").forEach(draw);

  document.addEventListener("submit", (event) => {
    const question = event.target.dataset?.ask;
    if (question && !window.confirm(question)) event.preventDefault();
  });

  const views = { j: "/page", o: "/page/operations", r: "/page/repository", n: "/page/nodes", a: "/page/audit" };
  let afterG = 0;
  const row = (step) => {
    const links = [...document.querySelectorAll("main tbody tr th a")];
    if (!links.length) return false;
    const at = links.indexOf(document.activeElement);
    links[Math.max(0, Math.min(links.length - 1, at < 0 ? 0 : at + step))].focus();
    return true;
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, textarea, select")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (event.key === "/") {
      const filter = document.querySelector("input[type=search]");
      if (filter) { event.preventDefault(); filter.focus(); filter.select(); }
    } else if (event.key === "g") {
      afterG = Date.now();
    } else if (Date.now() - afterG < 1200 && views[event.key]) {
      const link = document.querySelector(`.top nav a[data-key="${event.key}"]`);
      if (link) link.click();
    } else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && event.target.closest(".log") === null) {
      if (document.activeElement?.closest("main tbody tr th") && row(event.key === "ArrowDown" ? 1 : -1)) event.preventDefault();
    } else if (event.key === "Enter" && document.activeElement === document.body) {
      row(0);
    }
  });

  // A live operation that is over offers what comes next, which is not part of what is sent.
  document.addEventListener("over", () => window.location.reload());

  if (document.querySelector(".plot[data-from]")) {
    drawAll();
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
    new ResizeObserver(() => charts.forEach((chart, plot) => {
      if (chart.width !== plot.clientWidth && plot.clientWidth) chart.setSize({ width: plot.clientWidth, height: 180 });
    })).observe(document.querySelector("main"));
  }
})();
