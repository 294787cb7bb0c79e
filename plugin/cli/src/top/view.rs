//! The picture of a [`Model`]: a pure function of it, the clock and the area.

mod columns;
mod gpus;

use std::time::Duration;

use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use ratatui_core::style::{Color, Modifier, Style};
use ratatui_core::text::{Line, Span};

use super::keys::HELP;
use super::model::{Model, Sort};
use tessera_api::print::wrap;
use tessera_model::duration;
use tessera_model::time_format;
use tessera_system::terminal::Look;

/// Styles and characters. Without colour, weight and reversal still distinguish things.
#[derive(Clone, Copy)]
pub(super) struct Paint(pub Look);

impl Paint {
    fn colour(self, colour: Color) -> Style {
        if self.0.colour { Style::new().fg(colour) } else { Style::new() }
    }

    fn good(self) -> Style {
        self.colour(Color::Green)
    }

    fn warn(self) -> Style {
        self.colour(Color::Yellow)
    }

    fn bad(self) -> Style {
        self.colour(Color::Red).add_modifier(Modifier::BOLD)
    }

    fn dim(self) -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }

    fn head(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    /// A bar, and how it should look by how full it is.
    fn bar(self, part: u64, whole: u64, width: usize) -> (String, Style) {
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
    /// How often the plugin is asked.
    pub every: Duration,
    /// Whether keys do anything: not in a frame that is printed.
    pub live: bool,
}

/// Draws the model.
pub(super) fn draw(model: &Model, look: Look, moment: Moment, area: Rect, buffer: &mut Buffer) {
    let paint = Paint(look);
    let mut page = Page { area, row: 0, buffer };
    page.line(title(model, paint, moment));
    if let Some(silence) = &model.silence {
        let (since, ago) =
            (silence.since_unix_ms, time_format::ago(silence.since_unix_ms, moment.now_unix_ms));
        let shown = match (model.has_answer(), model.offline) {
            (false, _) => "",
            (true, true) => "; this is from the ledger and the pages, which know no GPU time",
            (true, false) => "; shown is what it said before",
        };
        let text = format!(
            "no answer since {} ({ago}): {}{shown}",
            time_format::clock(since),
            silence.reason
        );
        for line in wrap(&text, page.width()) {
            page.line(Line::styled(line, paint.bad()));
        }
    }
    if model.help {
        return help(&mut page, paint);
    }
    if !model.has_answer() {
        if model.silence.is_none() {
            page.line(Line::raw("waiting for the plugin's first answer"));
        }
        return;
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
}

/// The area, filled from above.
pub(super) struct Page<'a> {
    area: Rect,
    row: u16,
    buffer: &'a mut Buffer,
}

impl Page<'_> {
    fn width(&self) -> usize {
        self.area.width.into()
    }

    /// Rows that are left.
    fn left(&self) -> usize {
        self.area.height.saturating_sub(self.row).into()
    }

    fn line(&mut self, line: Line<'_>) {
        if self.row < self.area.height {
            let (x, y) = (self.area.x, self.area.y + self.row);
            self.buffer.set_line(x, y, &line, self.area.width);
            self.row += 1;
        }
    }

    /// Goes on where just `left` rows are left.
    fn skip_to(&mut self, left: usize) {
        let row = self.area.height.saturating_sub(u16::try_from(left).unwrap_or(u16::MAX));
        self.row = self.row.max(row);
    }
}

fn title(model: &Model, paint: Paint, moment: Moment) -> Line<'static> {
    let plugin = model.status.plugin.clone().unwrap_or_default();
    let mut spans = vec![Span::styled("tessera top", Style::new().add_modifier(Modifier::BOLD))];
    if model.has_answer() {
        let registration = match plugin.registration() {
            _ if model.offline => Span::styled("without the plugin", paint.bad()),
            tessera_kubelet_api::admin::Registration::Live => {
                Span::styled("registered", paint.good())
            }
            _ => Span::styled("not registered", paint.bad()),
        };
        let allocations = model.status.allocations.len();
        spans.push(Span::raw(format!("  {} ", time_format::clock(model.status.at_unix_ms))));
        spans.push(registration);
        spans.push(Span::raw(format!(
            "  {}  {}  every {}",
            count(model.status.gpus.len(), "GPU"),
            count(allocations, "allocation"),
            duration::format(moment.every),
        )));
    }
    if model.paused {
        spans.push(Span::styled("  PAUSED", paint.warn().add_modifier(Modifier::BOLD)));
    }
    Line::from(spans)
}

fn count(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

/// As many warnings as there is room for beside the rows, and how many more there are.
fn warnings(model: &Model, paint: Paint, left: usize) -> Vec<Line<'static>> {
    let all = &model.status.warnings;
    // The rows come first.
    let room = left.saturating_sub(model.shown().len() + 3).min(8).max(usize::from(left > 4));
    let whole = if all.len() <= room { all.len() } else { room.saturating_sub(1) };
    let mut lines: Vec<Line<'static>> =
        all[..whole].iter().map(|text| Line::styled(format!("! {text}"), paint.warn())).collect();
    if whole < all.len() && room > 0 {
        let more = all.len() - whole;
        let text = format!("! {more} warnings that `tessera status` tells");
        lines.push(Line::styled(text, paint.warn()));
    }
    lines
}

fn footer(model: &Model, paint: Paint) -> Line<'static> {
    if model.editing {
        return Line::raw(format!("/{}_   Enter: keep   Esc: all", model.filter));
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
    Line::styled(text, paint.dim())
}

fn help(page: &mut Page<'_>, paint: Paint) {
    page.line(Line::raw(""));
    for (keys, what) in HELP {
        page.line(Line::from(vec![
            Span::styled(format!("  {keys:<24}"), paint.good()),
            Span::raw(*what),
        ]));
    }
    page.line(Line::raw(""));
    for text in [
        "USED/QUOTA  charged and overhead, of what the container may hold",
        "ASK GOT1s GOT10s  thousandths of a GPU: its share, and what it got",
        "WAIT  part of the time that it wanted the GPU and had no lease",
        "REFUSED  requests over the quota in all, and how many a second",
    ] {
        page.line(Line::raw(format!("  {text}")));
    }
}
