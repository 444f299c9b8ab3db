// What needs the browser: the colour scheme, the zoom, the menu on a phone, the pause button.
(function () {
  const root = document.documentElement;
  const scheme = () =>
    root.getAttribute("data-mantine-color-scheme") === "dark" ? "dark" : "light";

  // dcc.Graph plots anew whenever it is told of a zoom, and plotly's uirevision then takes the
  // zoom for the figure's own range: carry it over ourselves.
  const zoomed = (figure, id) => {
    if (!figure) return window.dash_clientside.no_update;
    const plot = document.getElementById(JSON.stringify(id))?.querySelector(".js-plotly-plot");
    const before = plot?._fullLayout;
    if (!before || before.uirevision !== figure.layout.uirevision) return figure;
    const layout = { ...figure.layout };
    for (const name of ["xaxis", "yaxis"]) {
      if (before[name]?.autorange === false && !layout[name]?.range) {
        layout[name] = { ...layout[name], range: [...before[name].range], autorange: false };
      }
    }
    return { ...figure, layout };
  };

  // A request that overtakes the one before makes Dash drop that one's answer: where answers take
  // longer than a tick, nothing would ever be shown. So the next waits; but not for ever, as an
  // answer that never came, of a server that was started again, is not told of either.
  const PATIENCE = 30;
  let waited = 0;
  const beat = (ticks, looking, drawing) => {
    if ((looking || drawing) && waited < PATIENCE) {
      waited += 1;
      return window.dash_clientside.no_update;
    }
    waited = 0;
    return ticks;
  };

  // An answer that was long under way may come after the one that should have overtaken it, and
  // lay the numbers of the view before, or of another selection, over those asked for: ask again.
  const overtaken = (shown, ...asked) => {
    if (shown && JSON.stringify(shown) !== JSON.stringify(asked)) {
      window.dash_clientside.set_props("again", { data: Date.now() });
    }
  };

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    routeprof: {
      beat,
      overtaken,
      // The figures' colours come from the server: tell it whenever the scheme changes,
      // by the button or by the system.
      theme: () => {
        new MutationObserver(() =>
          window.dash_clientside.set_props("theme", { data: scheme() })
        ).observe(root, { attributes: true, attributeFilter: ["data-mantine-color-scheme"] });
        return scheme();
      },
      keepZoom: (figures, ids) => figures.map((figure, place) => zoomed(figure, ids[place])),
      openMenu: (opened, navbar) => ({ ...navbar, collapsed: { mobile: !opened } }),
      closeMenu: () => false,
      pause: (clicks) => (clicks % 2 ? [true, "Resume"] : [false, "Pause"]),
    },
  });
})();
