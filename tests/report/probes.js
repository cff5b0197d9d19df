// What the browser tests ask a page. Run in the page; each gives plain values.
({
  // Contrast of every text that is shown, against the first background behind it, as WCAG 2 computes it.
  contrasts() {
    for (const details of document.querySelectorAll('details')) details.open = true;
    const part = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
    const parse = colour => (colour.match(/[\d.]+/g) || []).map(Number);
    const behind = element => {
      for (; element; element = element.parentElement) {
        const colour = parse(getComputedStyle(element).backgroundColor);
        if (colour.length === 3 || colour[3] === 1) return colour;
      }
      return [255, 255, 255];
    };
    const ratio = (a, b) => {
      const [x, y] = [light(a), light(b)];
      return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
    };
    const texts = [], marks = [];
    for (const element of document.querySelectorAll('body *')) {
      const box = element.getBoundingClientRect();
      if (!box.width || !box.height) continue;
      const style = getComputedStyle(element), svg = element instanceof SVGElement;
      if ([...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))
        texts.push([ratio(parse(svg ? style.fill : style.color), behind(element)), element.textContent.slice(0, 40)]);
      if (svg && element.matches('.bar, .mark:not(.hollow)'))
        marks.push([ratio(parse(style.fill), behind(element)), element.outerHTML.slice(0, 60)]);
    }
    const lowestFirst = (a, b) => a[0] - b[0];
    return { texts: texts.sort(lowestFirst), marks: marks.sort(lowestFirst) };
  },

  plots() {
    return [...document.querySelectorAll('svg[role=img]')].filter(s => s.getBoundingClientRect().height > 10);
  },

  // Texts of plots that reach over the edge of their drawing.
  cutOff() {
    return this.plots().flatMap(plot => {
      const outer = plot.getBoundingClientRect();
      const over = box => box.left < outer.left - 1 || box.right > outer.right + 1
        || box.top < outer.top - 2 || box.bottom > outer.bottom + 2;
      return [...plot.querySelectorAll('text')].filter(t => over(t.getBoundingClientRect())).map(t => t.textContent);
    });
  },

  // Pixels of the smallest text in a plot, as it is shown.
  smallestText() {
    const scale = plot => plot.getBoundingClientRect().width / plot.viewBox.baseVal.width;
    return Math.min(...this.plots().flatMap(plot => [...plot.querySelectorAll('text')].map(
      text => parseFloat(getComputedStyle(text).fontSize) * scale(plot))));
  },
})
