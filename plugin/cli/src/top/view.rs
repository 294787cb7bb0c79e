//! The picture of a [`Model`]: a pure function of it, the clock and the area.

mod columns;
mod gpus;

use std::time::Duration;

use crossterm::style::{Color, ContentStyle, Stylize};

use super::keys::HELP;
use super::model::{Model, Sort};
use super::picture::{Picture, Span, raw, span};
use tessera_api::print::wrap;
use tessera_model::counted::plural;
use tessera_model::{duration, time_format};
use tessera_system::terminal::Look;
use tessera_view::node::Node;

/// Styles and characters. Without colour, weight and reversal still distinguish things.
#[derive(Clone, Copy)]
pub(super) struct Paint(pub Look);

impl Paint {
    fn colour(self, colour: Color) -> ContentStyle {
        let plain = ContentStyle::new();
        if self.0.colour { plain.with(colour) } else { plain }
    }

    fn good(self) -> ContentStyle {
        self.colour(Color::DarkGreen)
    }

    fn warn(self) -> ContentStyle {
        self.colour(Color::DarkYellow)
    }

    fn bad(self) -> ContentStyle {
        self.colour(Color::DarkRed).bold()
    }

    fn dim(self) -> ContentStyle {
        ContentStyle::new().dim()
    }

    fn head(self) -> ContentStyle {
        ContentStyle::new().reverse()
    }

    /// A bar, and how it should look by how full it is.
    fn bar(self, part: u64, whole: u64, width: usize) -> (String, ContentStyle) {
        let cells = u128::try_from(width).unwrap_or(0);
        // Full only when it is full, and never empty when it is not.
        let filled = match whole {
            0 => 0,
            _ => {
                (u128::from(part) * cells / u128::from(whole)).max(u128::from(part > 0)).min(cells)
            }
        };
        let filled = usize::try_from(filled).unwrap_or(width);
        let (full, empty) = if self.0.unicode { ("█", "·") } else { ("#", ".") };
        let style = match u128::from(part) * 100 {
            p if p >= u128::from(whole) * 95 => self.bad(),
            p if p >= u128::from(whole) * 80 => self.warn(),
            _ => self.good(),
        };
        (full.repeat(filled) + &empty.repeat(width - filled), style)
    }
}

/// What there is besides the model.
#[derive(Clone, Copy)]
pub(super) struct Moment {
    /// Unix milliseconds.
    pub now_unix_ms: i64,
    /// How often it is asked.
    pub every: Duration,
    /// Whether keys do anything: not in a frame that is printed.
    pub live: bool,
}

/// The model in so many columns and lines.
pub(super) fn draw(
    model: &Model,
    look: Look,
    moment: Moment,
    (width, height): (u16, u16),
) -> Picture {
    let paint = Paint(look);
    let mut page = Picture::new(width, height);
    page.line(title(model, paint, moment));
    if let Some(silence) = &model.silence {
        let (since, ago) =
            (silence.since_unix_ms, time_format::ago(silence.since_unix_ms, moment.now_unix_ms));
        let shown = if model.has_answer() { "; shown is what it said before" } else { "" };
        let text = format!(
            "no answer since {} ({ago}): {}{shown}",
            time_format::clock(since),
            silence.reason
        );
        for line in wrap(&text, page.width()) {
            page.line([span(&line, paint.bad())]);
        }
    }
    if model.help {
        help(&mut page, paint);
        return page;
    }
    if !model.has_answer() {
        if model.silence.is_none() {
            page.line([raw("waiting for the first answer")]);
        }
        return page;
    }
    gpus::draw(model, paint, &mut page);
    let foot = usize::from(moment.live);
    let warnings = warnings(model, paint, page.left().saturating_sub(foot));
    let room = page.left().saturating_sub(foot + warnings.len());
    columns::draw(model, paint, &mut page, room);
    page.skip_to(foot + warnings.len());
    warnings.into_iter().for_each(|line| page.line(line));
    if moment.live {
        page.line(footer(model, paint));
    }
    page
}

fn title(model: &Model, paint: Paint, moment: Moment) -> Vec<Span> {
    let mut spans = vec![span("tessera top", ContentStyle::new().bold())];
    if model.has_answer() {
        let fleet = &model.fleet;
        let views = || fleet.nodes.iter().filter_map(|entry| entry.view.as_ref());
        spans.push(raw(&format!("  {}  ", time_format::clock(fleet.at_unix_ms))));
        if model.paused {
            spans.push(span("PAUSED  ", paint.warn().bold()));
        }
        spans.push(match model.is_own() {
            true if views().any(|view| view.plugin.registration == "live") => {
                span("registered", paint.good())
            }
            true => span("not registered", paint.bad()),
            false => {
                let (all, answer) =
                    (fleet.nodes.len(), fleet.nodes.iter().filter(|one| one.answers).count());
                let text = format!("{}: {answer} of {all} nodes answer", fleet.name);
                span(&text, if all == answer { paint.good() } else { paint.bad() })
            }
        });
        let count = model.tenants();
        let of = match model.namespace.as_str() {
            "" if model.is_own() => String::new(),
            "" => " of all namespaces".to_owned(),
            name => format!(" of namespace {name}"),
        };
        let hidden: u64 = views().map(Node::hidden).sum();
        let hidden = match hidden {
            hidden if hidden > 0 && model.namespace.is_empty() => {
                format!(", and {hidden} that you may not see")
            }
            _ => String::new(),
        };
        spans.push(raw(&format!(
            "  {}  {}{of}{hidden}  every {}",
            plural(views().map(|view| view.gpus.len()).sum(), "GPU"),
            plural(count, "tenant"),
            duration::format(moment.every),
        )));
    }
    spans
}

/// As many warnings as there is room for beside the rows, and how many more there are. Of a cluster, only which nodes
/// do not answer: there are many.
fn warnings(model: &Model, paint: Paint, left: usize) -> Vec<[Span; 1]> {
    let mut all = Vec::new();
    for entry in &model.fleet.nodes {
        if !entry.answers && !model.is_own() {
            all.push(format!("node {}: {}", entry.node, entry.error));
        }
        for warning in entry.view.iter().flat_map(|view| &view.warnings).filter(|_| model.is_own())
        {
            all.push(warning.aged(model.fleet.at_unix_ms));
        }
    }
    // The rows come first.
    let room = left.saturating_sub(model.shown().len() + 3).min(8).max(usize::from(left > 4));
    let whole = if all.len() <= room { all.len() } else { room.saturating_sub(1) };
    let line = |text: String| [span(&text, paint.warn())];
    let mut lines: Vec<_> = all[..whole].iter().map(|text| line(format!("! {text}"))).collect();
    if whole < all.len() && room > 0 {
        let more = all.len() - whole;
        lines.push(line(format!("! {more} warnings that `status` tells")));
    }
    lines
}

fn footer(model: &Model, paint: Paint) -> [Span; 1] {
    if model.editing {
        return [raw(&format!("/{}_   Enter: keep   Esc: all", model.filter))];
    }
    let by = match model.sort {
        Sort::Memory => "memory",
        Sort::Share => "share",
        Sort::Waiting => "waiting",
        Sort::Refusals => "refusals",
        Sort::Name => "name",
    };
    let reverse = if model.reverse { " reversed" } else { "" };
    let filter = match model.filter.as_str() {
        "" => String::new(),
        text => format!("  only \"{text}\""),
    };
    let text = format!("q quit  ? help  m c w r n sort: {by}{reverse}  / filter{filter}  p pause");
    [span(&text, paint.dim())]
}

fn help(page: &mut Picture, paint: Paint) {
    page.line([]);
    for (keys, what) in HELP {
        page.line([span(&format!("  {keys:<24}"), paint.good()), raw(what)]);
    }
    page.line([]);
    for text in [
        "USED/QUOTA  charged and overhead, of what the container may hold",
        "ASK USED LEASED  parts of ten seconds: its share, what it used (?: unknown) and what it had leased",
        "WAIT  part of the time that it wanted the GPU and had no lease",
        "REFUSED  requests over the quota in all, and how many a second",
    ] {
        page.line([raw(&format!("  {text}"))]);
    }
}
