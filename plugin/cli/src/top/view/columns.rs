//! A line for each allocation and GPU, in as many columns as there is width for.

use crossterm::style::ContentStyle;

use super::Paint;
use crate::top::model::{Model, Row};
use crate::top::picture::{Picture, Span, raw, span};
use crate::top::text::{bytes, dash, per_second, percent};
use tessera_api::print::{columns, shorten};
use tessera_model::percent::{format_cores, format_used};

/// A column; the name takes what they leave.
#[derive(Clone, Copy)]
struct Column {
    title: &'static str,
    /// Of [`NODE`], [`GPU`] and [`BAR`], the least: they are as wide as they must be.
    width: usize,
    /// The narrowest terminal that shows it.
    from: usize,
    left: bool,
    cell: fn(&Row, Paint) -> (String, ContentStyle),
}

const BAR: &str = "";
const NODE: &str = "NODE";
const GPU: &str = "GPU";
/// Widest name of a node.
const NODE_MOST: usize = 24;

/// What is left for the name of a pod on the narrowest terminal that shows all columns meant for it.
const NAME_LEAST: usize = 12;

const COLUMNS: &[Column] = &[
    Column {
        title: NODE,
        width: 4,
        from: 0,
        left: true,
        cell: |row, _| plain(once(row, row.node.clone())),
    },
    Column { title: GPU, width: 3, from: 60, left: false, cell: |row, _| plain(row.gpu.clone()) },
    Column { title: BAR, width: 0, from: 60, left: true, cell: |_, _| plain(String::new()) },
    Column { title: "USED/QUOTA", width: 11, from: 0, left: true, cell: memory },
    Column { title: "ASK", width: 5, from: 44, left: false, cell: asked },
    Column {
        title: "USED",
        width: 5,
        from: 0,
        left: false,
        cell: |row, p| got(row, row.used_10s_millis.map(format_used), p),
    },
    Column {
        title: "LEASED",
        width: 6,
        from: 70,
        left: false,
        cell: |row, p| got(row, row.got_10s_millis.map(format_cores), p),
    },
    Column { title: "WAIT", width: 4, from: 36, left: false, cell: waited },
    Column { title: "REFUSED", width: 12, from: 100, left: false, cell: refused_and_rate },
    Column { title: "REFUSED", width: 7, from: 50, left: false, cell: refused },
    Column { title: "LNCH/s", width: 6, from: 78, left: false, cell: launches },
    Column {
        title: "POLICY",
        width: 6,
        from: 96,
        left: true,
        cell: |row, _| plain(row.policy.clone()),
    },
    Column { title: "GATE", width: 6, from: 104, left: true, cell: gate },
    Column {
        title: "STATE",
        width: 9,
        from: 112,
        left: true,
        cell: |row, _| plain(row.state.clone()),
    },
];

/// Draws header and rows in `room` lines.
pub(super) fn draw(model: &Model, paint: Paint, page: &mut Picture, room: usize) {
    let width = page.width();
    let rows = model.shown();
    let all = shown(width, &rows, model.is_own());
    let taken: usize = all.iter().map(|column| column.width + 1).sum();
    let longest = rows.iter().map(|row| columns(&title(row))).max().unwrap_or(0);
    let name = width.saturating_sub(taken).min(longest.max(NAME_LEAST + 8));
    let mut head = fitted("POD/CONTAINER", name);
    for column in &all {
        head.push(' ');
        head.push_str(&column.pad(column.title));
    }
    page.line([span(&format!("{head:<width$}"), paint.head())]);
    if rows.is_empty() {
        let text = match model.filter.as_str() {
            "" => "No tenants.".to_owned(),
            filter => format!("Nothing contains \"{filter}\"."),
        };
        return page.line([raw(&text)]);
    }
    let room = room.saturating_sub(1);
    let rest = rows.len().saturating_sub(model.scroll);
    let fits = if rest <= room { rest } else { room.saturating_sub(1) };
    for row in rows.iter().skip(model.scroll).take(fits) {
        page.line(line(row, &all, name, paint));
    }
    if fits < rest {
        page.line([span(&format!("  and {} more rows", rest - fits), paint.dim())]);
    }
}

/// The columns for a width: of two with the same title, the first that fits. Nodes of a cluster take theirs first.
fn shown(width: usize, rows: &[&Row], is_own: bool) -> Vec<Column> {
    let mut columns: Vec<Column> = Vec::new();
    let widest = |of: fn(&Row) -> &String| rows.iter().map(|row| of(row).chars().count()).max();
    let node = widest(|row| &row.node).unwrap_or(0).min(NODE_MOST).min(width / 6);
    let has_nodes = !is_own && width >= 60;
    let left = if has_nodes { width.saturating_sub(node + 1) } else { width };
    for column in COLUMNS {
        let least = match column.title {
            NODE if !has_nodes => continue,
            NODE => node,
            GPU => widest(|row| &row.gpu).unwrap_or(0),
            BAR => bar_width(left),
            _ => 0,
        };
        if column.from <= left && !columns.iter().any(|known| known.title == column.title) {
            columns.push(Column { width: column.width.max(least), ..*column });
        }
    }
    columns
}

fn bar_width(width: usize) -> usize {
    match width {
        0..60 => 0,
        60..100 => 4,
        100..140 => 8,
        _ => 16,
    }
}

impl Column {
    fn pad(&self, text: &str) -> String {
        let width = self.width;
        let text = shorten(text, width);
        if self.left { format!("{text:<width$}") } else { format!("{text:>width$}") }
    }
}

/// In just so many columns.
fn fitted(text: &str, width: usize) -> String {
    let text = shorten(text, width);
    let fill = width.saturating_sub(columns(&text));
    format!("{text}{:fill$}", "")
}

fn line(row: &Row, columns: &[Column], name: usize, paint: Paint) -> Vec<Span> {
    let mut spans = vec![raw(&fitted(&title(row), name))];
    for column in columns {
        spans.push(raw(" "));
        let (text, style) = match column.title {
            BAR => paint.bar(row.used, row.limit, column.width),
            _ => (column.cell)(row, paint),
        };
        spans.push(span(&column.pad(&text), style));
    }
    spans
}

/// What a row is called.
fn title(row: &Row) -> String {
    match (row.first, row.container.as_str()) {
        (false, _) => String::new(),
        (true, "") => row.name.clone(),
        (true, container) => format!("{}/{container}", row.name),
    }
}

/// What belongs to the allocation as a whole stands in its first row.
fn once(row: &Row, text: String) -> String {
    if row.first { text } else { String::new() }
}

fn plain(text: String) -> (String, ContentStyle) {
    (text, ContentStyle::new())
}

fn memory(row: &Row, paint: Paint) -> (String, ContentStyle) {
    let style = paint.bar(row.used, row.limit, 0).1;
    (format!("{}/{}", bytes(row.used), bytes(row.limit)), style)
}

fn asked(row: &Row, _: Paint) -> (String, ContentStyle) {
    (format_cores(row.asked_millis), ContentStyle::new())
}

fn got(row: &Row, share: Option<String>, paint: Paint) -> (String, ContentStyle) {
    let style = if row.is_short() { paint.warn() } else { ContentStyle::new() };
    (once(row, dash(share)), style)
}

fn waited(row: &Row, paint: Paint) -> (String, ContentStyle) {
    let style = if row.is_short() { paint.warn() } else { ContentStyle::new() };
    (once(row, dash(row.rates.waited.map(percent))), style)
}

fn refused(row: &Row, paint: Paint) -> (String, ContentStyle) {
    let now = row.rates.refusals.is_some_and(|rate| rate > 0.0);
    let style = if now { paint.bad() } else { ContentStyle::new() };
    (once(row, per_count(row.refusals)), style)
}

fn refused_and_rate(row: &Row, paint: Paint) -> (String, ContentStyle) {
    let (total, style) = refused(row, paint);
    let rate = row.rates.refusals.filter(|rate| *rate > 0.0);
    let text = match rate {
        Some(rate) => format!("{total} {}/s", per_second(rate)),
        None => total,
    };
    (once(row, text), style)
}

fn launches(row: &Row, _: Paint) -> (String, ContentStyle) {
    (once(row, dash(row.rates.launches.map(per_second))), ContentStyle::new())
}

fn gate(row: &Row, _: Paint) -> (String, ContentStyle) {
    let text = if row.gate.is_empty() { "-" } else { &row.gate };
    (once(row, text.to_owned()), ContentStyle::new())
}

#[allow(clippy::cast_precision_loss, reason = "a count for people")]
fn per_count(count: u64) -> String {
    if count < 100_000 { count.to_string() } else { per_second(count as f64) }
}
