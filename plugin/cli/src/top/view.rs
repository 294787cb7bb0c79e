//! What a [`Model`] looks like: lines, as a pure function of it, the clock and the area.

use std::time::Duration;

use tessera_api::print::{Cell, Column, Page, Paper, Sheet, Tone, head, shorten};
use tessera_model::counted::plural;
use tessera_model::percent::{format_cores, format_used};
use tessera_model::{duration, printable, time_format};
use tessera_view::fleet::Entry;
use tessera_view::gpu::Gpu;
use tessera_view::tenant::Tenant;

use super::model::{Model, Row};

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

const NODE: &str = "NODE";
const NAME: &str = "NAME";
/// The narrowest area in which GPUs have their names.
const NAMED: usize = 120;
const ROWS: &[Column] = &[
    Column::name("POD/CONTAINER").least(20),
    Column::name(NODE).rank(1),
    Column::number("GPU").rank(4),
    Column::text("").rank(5),
    Column::number("USED/QUOTA"),
    Column::number("ASK").rank(2),
    Column::number("USED"),
    Column::number("LEASED").rank(6),
    Column::number("WAIT").rank(1),
    Column::number("REFUSED").rank(3),
    Column::number("LNCH/s").rank(7),
    Column::text("POLICY").rank(8),
    Column::text("GATE").rank(9),
    Column::text("STATE").rank(10),
];
const GPUS: &[Column] = &[
    Column::number("GPU"),
    Column::name(NAME).rank(3),
    Column::text("HEALTH"),
    Column::text("").rank(2),
    Column::number("USED/SOLD/TOTAL"),
    Column::number("QUANT").rank(1),
    Column::number("WAIT"),
    Column::name("LEASE"),
];

/// The model in so many columns and lines.
pub(super) fn draw(
    model: &Model,
    colour: bool,
    moment: Moment,
    (width, height): (u16, u16),
) -> Vec<String> {
    let view = View { model, moment, paper: Paper { width: Some(width.into()), colour } };
    let mut lines = view.laid(|page| view.head(page));
    let height = usize::from(height);
    if model.has_answer() {
        let left = |lines: &[String]| height.saturating_sub(lines.len());
        lines.extend(view.laid(|page| view.gpus(page, left(&lines) / 3)));
        let foot = view.laid(|page| view.foot(page, left(&lines)));
        let room = left(&lines).saturating_sub(foot.len());
        lines.extend(view.laid(|page| view.rows(page, room)));
        // A frame that is printed is as high as it must be.
        let gap = if moment.live { left(&lines).saturating_sub(foot.len()) } else { 1 };
        lines.extend(vec![String::new(); gap]);
        lines.extend(foot);
    }
    lines.truncate(height);
    lines
}

struct View<'a> {
    model: &'a Model,
    moment: Moment,
    paper: Paper,
}

impl View<'_> {
    fn laid(&self, fill: impl FnOnce(&mut Page)) -> Vec<String> {
        let mut page = Page::new(self.paper);
        fill(&mut page);
        page.finish().lines().map(str::to_owned).collect()
    }

    /// In one line, as far as there is room.
    fn line(&self, page: &mut Page, tone: Tone, text: &str) {
        let width = self.paper.width.unwrap_or(usize::MAX).saturating_sub(2);
        page.say(0, tone, head(&printable::line(text), width));
    }

    fn head(&self, page: &mut Page) {
        let View { model, moment, .. } = self;
        let (tone, title) = self.title();
        self.line(page, tone, &title);
        if let Some(silence) = &model.silence {
            let since = silence.since_unix_ms;
            let shown = if model.has_answer() { "; shown is what it said before" } else { "" };
            let text = format!(
                "no answer since {} ({}): {}{shown}",
                time_format::clock(since),
                time_format::ago(since, moment.now_unix_ms),
                silence.reason
            );
            page.say(0, Tone::Bad, &text);
        }
        if !model.has_answer() && model.silence.is_none() {
            page.say(0, Tone::Plain, "waiting for the first answer");
        }
    }

    fn title(&self) -> (Tone, String) {
        let model = self.model;
        if !model.has_answer() {
            return (Tone::Head, "tessera top".to_owned());
        }
        let nodes = &model.fleet.nodes;
        let views = || nodes.iter().filter_map(|entry| entry.view.as_ref());
        let (is_well, state) = match model.is_own() {
            true if views().any(|view| view.plugin.registration == "live") => {
                (true, "registered".to_owned())
            }
            true => (false, "not registered".to_owned()),
            false => {
                let answer = nodes.iter().filter(|one| one.answers).count();
                let name = &model.fleet.name;
                let all = nodes.len();
                (answer == all, format!("{name}: {answer} of {all} nodes answer"))
            }
        };
        let of = match model.namespace.as_str() {
            "" if model.is_own() => String::new(),
            "" => " of all namespaces".to_owned(),
            name => format!(" of namespace {name}"),
        };
        let hidden = match views().map(|view| u64::from(view.hidden_tenants)).sum::<u64>() {
            hidden if hidden > 0 && model.namespace.is_empty() => {
                format!(", and {hidden} that you may not see")
            }
            _ => String::new(),
        };
        let tone = if is_well { Tone::Head } else { Tone::Bad };
        let title = format!(
            "tessera top  {}  {state}  {}  {}{of}{hidden}  every {}",
            time_format::clock(model.fleet.at_unix_ms),
            plural(views().map(|view| view.gpus.len()).sum(), "GPU"),
            plural(model.tenants(), "tenant"),
            duration::format(self.moment.every),
        );
        (tone, title)
    }

    /// Of this node all, of a cluster those that a tenant which is shown is on; a node may have sixteen.
    fn gpus(&self, page: &mut Page, room: usize) {
        let model = self.model;
        let rows = model.shown();
        let is_on = |(entry, gpu): &(&Entry, &Gpu)| {
            let is_its = |row: &Row<'_>| row.node == entry.node && row.used.gpu_uuid == gpu.uuid;
            model.is_own() || rows.iter().any(is_its)
        };
        let all = model.fleet.nodes.iter().flat_map(|entry| {
            entry.view.iter().flat_map(|view| &view.gpus).map(move |gpu| (entry, gpu))
        });
        let all: Vec<(&Entry, &Gpu)> = all.filter(is_on).collect();
        if all.is_empty() {
            if model.is_own() {
                page.say(0, Tone::Plain, "No GPUs.");
            }
            return;
        }
        let room = room.max(1);
        let fits = if all.len() < room { all.len() } else { room.saturating_sub(2).max(1) };
        let mut sheet = Sheet::new(GPUS);
        for (entry, gpu) in &all[..fits] {
            let called = match model.is_own() {
                true => gpu.index.to_string(),
                false => format!("{}/{}", shorten(&entry.node, 24), gpu.index),
            };
            let (used, total) = (gpu.memory_used_bytes, gpu.memory_total_bytes);
            let memory = [used, gpu.memory_limits_bytes, total].map(bytes).join("/");
            let lease = gpu.lease.clone().unwrap_or_default();
            let tenants = entry.view.as_ref().map_or(&[][..], |view| &view.tenants);
            let (health, tone) = health(gpu);
            sheet.row(vec![
                called.into(),
                gpu.name.as_str().into(),
                Cell::toned(health, tone),
                self.bar(used, total),
                memory.into(),
                quantum(lease.quantum_us).into(),
                lease.waiting.to_string().into(),
                holder(gpu, tenants).into(),
            ]);
        }
        if self.paper.width.is_some_and(|width| width < NAMED) {
            sheet = sheet.without(NAME);
        }
        sheet.lay(page);
        if fits < all.len() {
            page.say(2, Tone::Plain, &format!("and {} more GPUs", all.len() - fits));
        }
    }

    fn rows(&self, page: &mut Page, room: usize) {
        let model = self.model;
        let rows = model.shown();
        if rows.is_empty() {
            let text = match model.filter.as_str() {
                "" => "No tenants.".to_owned(),
                filter => format!("Nothing contains \"{filter}\"."),
            };
            return page.say(0, Tone::Plain, &text);
        }
        let room = room.saturating_sub(1);
        let rest = rows.len().saturating_sub(model.scroll);
        let fits = if rest <= room { rest } else { room.saturating_sub(1) };
        let mut sheet = Sheet::new(ROWS);
        for row in rows.iter().skip(model.scroll).take(fits) {
            sheet.row(self.cells(row));
        }
        if model.is_own() {
            sheet = sheet.without(NODE);
        }
        sheet.lay(page);
        if fits < rest {
            page.say(2, Tone::Plain, &format!("and {} more rows", rest - fits));
        }
    }

    fn cells(&self, row: &Row<'_>) -> Vec<Cell> {
        let Row { node, tenant, used, rates, .. } = row;
        // What belongs to the allocation as a whole stands in its first row.
        let once = |text: String| if row.is_first { text } else { String::new() };
        let title = match tenant.container.as_str() {
            "" => row.name(),
            container => format!("{}/{container}", row.name()),
        };
        let short = if row.is_short() { Tone::Warn } else { Tone::Plain };
        let refusals = match tenant.refusals {
            few @ 0..100_000 => few.to_string(),
            #[allow(clippy::cast_precision_loss, reason = "a count for people")]
            many => per_second(many as f64),
        };
        let (refused, is_refused) = match rates.refusals.filter(|rate| *rate > 0.0) {
            Some(rate) => (format!("{refusals} {}/s", per_second(rate)), Tone::Bad),
            None => (refusals, Tone::Plain),
        };
        let (held, limit) = (used.memory_used_bytes, used.memory_limit_bytes);
        let gate = tenant.compute.as_ref().map_or("", |compute| compute.gate_text());
        vec![
            once(title).into(),
            once((*node).to_owned()).into(),
            if self.model.wide { used.gpu_uuid.clone() } else { row.gpu_index() }.into(),
            self.bar(held, limit),
            Cell::toned(format!("{}/{}", bytes(held), bytes(limit)), fullness(held, limit)),
            format_cores(used.cores_millis).into(),
            Cell::toned(once(dash(row.used_10s_millis().map(format_used))), short),
            Cell::toned(once(dash(row.got_10s_millis().map(format_cores))), short),
            Cell::toned(once(dash(rates.waited.map(percent))), short),
            Cell::toned(once(refused), is_refused),
            once(dash(rates.launches.map(per_second))).into(),
            used.policy.into_str().into(),
            once(if gate.is_empty() { "-" } else { gate }.to_owned()).into(),
            tenant.state.as_str().into(),
        ]
    }

    fn bar(&self, part: u64, whole: u64) -> Cell {
        let width: usize = if self.paper.width.is_some_and(|width| width < 100) { 4 } else { 8 };
        // Full only when it is full, and never empty when it is not.
        let filled = match whole {
            0 => 0,
            _ => (u128::from(part) * width as u128 / u128::from(whole))
                .max(u128::from(part > 0))
                .min(width as u128),
        };
        let filled = usize::try_from(filled).unwrap_or(width);
        Cell::toned("█".repeat(filled) + &"·".repeat(width - filled), fullness(part, whole))
    }

    /// As many warnings as there is room for beside the rows, how many more there are, and the keys. Of a cluster, only
    /// which nodes do not answer: there are many.
    fn foot(&self, page: &mut Page, left: usize) {
        let model = self.model;
        let left = left.saturating_sub(usize::from(self.moment.live));
        let mut all = Vec::new();
        for entry in &model.fleet.nodes {
            if !entry.answers && !model.is_own() {
                all.push(format!("node {}: {}", entry.node, entry.error));
            }
            let warnings = entry.view.iter().flat_map(|view| &view.warnings);
            for warning in warnings.filter(|_| model.is_own()) {
                all.push(warning.aged(model.fleet.at_unix_ms));
            }
        }
        // The rows come first.
        let room = left.saturating_sub(model.shown().len() + 3).min(8).max(usize::from(left > 4));
        let whole = if all.len() <= room { all.len() } else { room.saturating_sub(1) };
        all[..whole].iter().for_each(|text| self.line(page, Tone::Warn, &format!("! {text}")));
        if whole < all.len() && room > 0 {
            let more = all.len() - whole;
            self.line(page, Tone::Warn, &format!("! {more} warnings that `status` tells"));
        }
        if self.moment.live {
            self.line(page, Tone::Plain, &footer(model));
        }
    }
}

/// How something looks of which `part` is used.
fn fullness(part: u64, whole: u64) -> Tone {
    match u128::from(part) * 100 {
        p if p >= u128::from(whole) * 95 => Tone::Bad,
        p if p >= u128::from(whole) * 80 => Tone::Warn,
        _ => Tone::Plain,
    }
}

fn health(gpu: &Gpu) -> (&str, Tone) {
    match gpu.state.as_str() {
        _ if !gpu.cordon.is_empty() => ("cordoned", Tone::Warn),
        // Held back for another reason than its health.
        "healthy" if !gpu.withheld.is_empty() => ("withheld", Tone::Bad),
        "healthy" => ("healthy", Tone::Plain),
        state @ ("suspect" | "recovering") => (state, Tone::Warn),
        state => (state, Tone::Bad),
    }
}

fn footer(model: &Model) -> String {
    if model.editing {
        return format!("/{}_   Enter: keep   Esc: all", model.filter);
    }
    let by = model.sort.into_str();
    let reverse = if model.reverse { " reversed" } else { "" };
    let filter = match model.filter.as_str() {
        "" => String::new(),
        text => format!("  only \"{text}\""),
    };
    format!("q quit  m c w r n sort: {by}{reverse}  R reverse  / filter{filter}")
}

/// A size in at most five characters: `512M`, `9.8G`, `39.7G`, `1.5T`.
fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "K", "M", "G", "T", "P"];
    let mut unit = 0;
    let mut value = u128::from(bytes) * 10;
    // 1000, so that three digits and a point always do.
    while value >= 10_000 && unit + 1 < UNITS.len() {
        value /= 1024;
        unit += 1;
    }
    match (value / 10, value % 10) {
        (whole, 0) => format!("{whole}{}", UNITS[unit]),
        (whole, _) if whole >= 100 => format!("{whole}{}", UNITS[unit]),
        (whole, tenth) => format!("{whole}.{tenth}{}", UNITS[unit]),
    }
}

pub(super) fn dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_owned())
}

/// A part of one as per cent.
pub(super) fn percent(part: f64) -> String {
    format!("{:.0}%", part * 100.0)
}

/// A rate in at most five characters.
pub(super) fn per_second(rate: f64) -> String {
    match rate {
        r if r <= 0.0 => "0".to_owned(),
        r if r < 10.0 => format!("{r:.1}"),
        r if r < 10_000.0 => format!("{r:.0}"),
        r if r < 1e6 => format!("{:.0}k", r / 1e3),
        r if r < 1e9 => format!("{:.0}M", r / 1e6),
        _ => ">1G".to_owned(),
    }
}

/// The length of a lease.
pub(super) fn quantum(us: u64) -> String {
    match us {
        0 => "-".to_owned(),
        us if us < 10_000 => format!("{}.{}ms", us / 1000, us % 1000 / 100),
        us => format!("{}ms", us / 1000),
    }
}

/// The holder of a GPU's lease, as a pod where that is known.
pub(super) fn holder(gpu: &Gpu, tenants: &[Tenant]) -> String {
    let id = gpu.lease.as_ref().map_or("", |lease| lease.holder.as_str());
    let holder = tenants.iter().find(|one| one.id == id && !one.pod.is_empty());
    match (holder, id) {
        (_, "") => "-".to_owned(),
        (Some(one), _) => format!("{}/{}", one.namespace, one.pod),
        (None, id) => id.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (size, text) in [
            (0, "0B"),
            (999, "999B"),
            (1023, "0.9K"),
            (1 << 20, "1M"),
            (3 << 29, "1.5G"),
            (80 << 30, "80G"),
            (u64::MAX, "16383P"),
        ] {
            assert_eq!(bytes(size), text);
        }
        assert_eq!(
            [0.0, 0.25, 12.4, 12_345.0, 2e6, 1e12].map(per_second),
            ["0", "0.2", "12", "12k", "2M", ">1G"]
        );
        assert_eq!([0, 5000, 2500, 20_000].map(quantum), ["-", "5.0ms", "2.5ms", "20ms"]);
    }
}
