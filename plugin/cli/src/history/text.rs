//! `history` for people.

use tessera_api::print::{Column, Page, Paper, Sheet};
use tessera_model::counted::times;
use tessera_model::percent::format_cores;
use tessera_model::quantity::format_bytes;
use tessera_model::time_format;
use tessera_view::history::{Answer, GpuSeries, Query, TenantPoint, TenantSeries};

use super::chart::{Column as Cells, LABEL, UNKNOWN, columns, spark};

/// Fewest columns of a line of bars; on a narrower terminal each tenant has a line.
const NARROWEST: usize = 24;
/// Most columns of a line of bars.
const WIDEST: usize = 160;
/// Events that are shown; JSON has all.
const EVENTS: usize = 20;
/// Longest time after the last finished bucket in which the next one may still be without a look, milliseconds: it
/// lasts 10 s, and the look is late on a busy node.
const UNFINISHED_MS: i64 = 20_000;
/// Characters of a tenant's line without its picture.
const SHORT: usize = 88;

/// All of it, in lines of at most `room` columns, but for single words that are longer.
/// So many of the first tenants have bars of their own, the others a line each.
pub(super) fn text(answer: &Answer, asked: &Query, room: usize, charts: usize) -> String {
    let until = if asked.until_unix_ms == 0 { seen_until(answer) } else { asked.until_unix_ms };
    let since = asked.since_unix_ms.max(first(answer).unwrap_or(until));
    let page = Page::new(Paper { width: Some(room.max(20)), colour: false });
    let mut report = Report { page, room, window: (since, until), answer };
    report.all(charts);
    report.page.finish()
}

/// Now, without the time since the last look: what happens in it is in no bucket yet.
fn seen_until(answer: &Answer) -> i64 {
    let tenants = answer.tenants.iter().filter_map(|one| Some(one.points.last()?.at_unix_ms));
    let gpus = answer.gpus.iter().filter_map(|one| Some(one.points.last()?.at_unix_ms));
    let step_ms = i64::from(answer.step_seconds) * 1000;
    let end = tenants.chain(gpus).max().map(|at| at.saturating_add(step_ms));
    // A plugin that has not looked for longer does not look.
    let is_unfinished =
        |end: &i64| (0..UNFINISHED_MS).contains(&answer.at_unix_ms.saturating_sub(*end));
    end.filter(is_unfinished).unwrap_or(answer.at_unix_ms)
}

/// The oldest bucket of the answer.
fn first(answer: &Answer) -> Option<i64> {
    let tenants = answer.tenants.iter().filter_map(|one| Some(one.points.first()?.at_unix_ms));
    let gpus = answer.gpus.iter().filter_map(|one| Some(one.points.first()?.at_unix_ms));
    tenants.chain(gpus).min()
}

struct Report<'a> {
    page: Page,
    room: usize,
    window: (i64, i64),
    answer: &'a Answer,
}

impl Report<'_> {
    fn all(&mut self, charts: usize) {
        for remark in &self.answer.remarks {
            self.page.labelled("note: ", remark);
        }
        let (since, until) = self.window;
        if self.answer.tenants.is_empty() && self.answer.gpus.is_empty() {
            self.page.labelled("", "nothing was seen in that time");
        } else if first(self.answer).is_some() {
            let (from, to) = (time_format::utc(since), time_format::utc(until));
            let length = match self.answer.step_seconds {
                3600 => "1h",
                300 => "5m",
                _ => "10s",
            };
            self.page.labelled("", &format!("{from} to {to} UTC, buckets of {length}"));
        }
        let answer = self.answer;
        for gpu in &answer.gpus {
            self.gpu(gpu);
        }
        if answer.gpus.is_empty() {
            for one in answer.tenants.iter().take(charts) {
                self.tenant(one);
            }
            let rest = answer.tenants.len().saturating_sub(charts);
            if rest > 0 {
                self.page.gap();
                if charts > 0 {
                    self.page.labelled("", &format!("{rest} more, in short:"));
                }
                let rest: Vec<&TenantSeries> = answer.tenants.iter().skip(charts).collect();
                self.short(&rest);
            }
        }
        self.events();
    }

    fn width(&self) -> Option<usize> {
        let width = self.room.saturating_sub(LABEL + 1).min(WIDEST);
        (width >= NARROWEST).then_some(width)
    }

    fn tenant(&mut self, one: &TenantSeries) {
        self.page.gap();
        let name = match one.pod.is_empty() {
            true => format!("allocation {}", one.id),
            false => format!("{}/{}, container {}", one.namespace, one.pod, one.container),
        };
        let lives = if one.live { "lives" } else { "gone" };
        self.page.labelled("", &format!("{name}, on {}: {lives}", one.gpu_uuid));
        let Some(width) = self.width() else { return self.short(&[one]) };
        let columns =
            columns(one.points.iter().map(part), self.window, self.answer.step_seconds, width);
        let peak = one.points.iter().map(|point| point.memory_peak_bytes).max().unwrap_or(0);
        let quota = one.points.last().map_or(0, |point| point.memory_limit_bytes);
        self.memory(&columns, peak.max(quota));
        let used = spark(&columns, |column| column.got);
        let wanted = spark(&columns, |column| column.got + column.waited);
        self.marks("used", &used);
        self.marks("wanted", &wanted);
        self.refusals(&columns);
        self.axis(width);
        let (got, waited, seconds) = totals(&one.points);
        let share = one.points.last().map_or(0, |point| point.cores_millis);
        let observed: f64 = one.points.iter().map(|point| point.seconds).sum();
        let unknown = match observed - seconds > observed / 100.0 {
            true => format!(", unknown for {} of the time", percent(observed - seconds, observed)),
            false => String::new(),
        };
        let memory = format!("memory: peak {} of {}", format_bytes(peak), format_bytes(quota));
        let time = format!(
            "GPU time: used {}, wanted {}, share {}{unknown}",
            percent(got, seconds),
            percent(got + waited, seconds),
            format_cores(share)
        );
        self.page.labelled("  ", &memory);
        self.page.labelled("  ", &time);
        self.unknown(&columns);
    }

    /// Bars of the highest memory, of which `whole` bytes are a full one.
    fn memory(&mut self, columns: &[Cells], whole: u64) {
        let part = |column: &Cells| column.peak as f64 / whole.max(1) as f64;
        let bars = spark(columns, part);
        self.marks("memory", &bars);
    }

    /// Marks where it was refused memory.
    fn refusals(&mut self, columns: &[Cells]) {
        let refusals: u64 =
            columns.iter().map(|column| column.refusals).fold(0, u64::saturating_add);
        if refusals > 0 {
            let mark = |column: &Cells| match column.refusals {
                0 => ' ',
                1..=9 => '!',
                _ => 'X',
            };
            let marks: String = columns.iter().map(mark).collect();
            self.marks("refused", &marks);
            self.page
                .labelled("  ", &format!("refused memory {}: ! up to 9, X more", times(refusals)));
        }
    }

    fn gpu(&mut self, one: &GpuSeries) {
        self.page.gap();
        let name = match one.index {
            Some(index) => format!("GPU {index}, {}", one.gpu_uuid),
            None => format!("{}, gone", one.gpu_uuid),
        };
        self.page.labelled("", &name);
        let parts = one.points.iter().map(|point| {
            let share =
                |seconds: f64| if point.seconds > 0.0 { seconds / point.seconds } else { 0.0 };
            let column = Cells {
                seconds: point.seconds,
                peak: point.memory_peak_bytes,
                got: share(point.leased_seconds),
                unhealthy: point.unhealthy_seconds > 0.0,
                cordoned: point.cordoned_seconds > 0.0,
                ..Cells::default()
            };
            (point.at_unix_ms, column)
        });
        let on: Vec<&TenantSeries> =
            self.answer.tenants.iter().filter(|tenant| tenant.gpu_uuid == one.gpu_uuid).collect();
        let Some(width) = self.width() else { return self.short(&on) };
        let columns = columns(parts, self.window, self.answer.step_seconds, width);
        let peak = one.points.iter().map(|point| point.memory_peak_bytes).max().unwrap_or(0);
        let quotas = one.points.last().map_or(0, |point| point.memory_limits_bytes);
        self.memory(&columns, peak.max(quotas));
        let spark = spark(&columns, |column| column.got);
        self.marks("leased", &spark);
        if columns.iter().any(|column| column.unhealthy || column.cordoned) {
            let mark = |column: &Cells| match (column.unhealthy, column.cordoned) {
                (true, _) => 'u',
                (false, true) => 'c',
                (false, false) => ' ',
            };
            let marks: String = columns.iter().map(mark).collect();
            self.marks("state", &marks);
            self.page.labelled("  ", "u not healthy, c cordoned");
        }
        self.axis(width);
        let (peak, quotas) = (format_bytes(peak), format_bytes(quotas));
        let memory = format!("memory: peak {peak}, quotas of its tenants together {quotas}");
        self.page.labelled("  ", &memory);
        self.unknown(&columns);
        if !on.is_empty() {
            self.page.labelled("  ", "its tenants:");
            self.short(&on);
        }
    }

    /// A line for each tenant, with its GPU time as a picture where there is room.
    fn short(&mut self, tenants: &[&TenantSeries]) {
        let cells = self.room.saturating_sub(SHORT).clamp(8, WIDEST);
        let mut sheet = Sheet::new(&[
            Column::name("POD"),
            Column::name("CONTAINER").rank(4),
            Column::text("NOW").rank(3),
            Column::number("PEAK").rank(2),
            Column::number("QUOTA").rank(2),
            Column::number("REFUSED").rank(1),
            Column::number("GPU TIME"),
            Column::text("OVER TIME").least(cells).rank(5),
        ]);
        for one in tenants {
            let name = match one.pod.is_empty() {
                true => one.id.clone(),
                false => format!("{}/{}", one.namespace, one.pod),
            };
            let points = &one.points;
            let (got, _, seconds) = totals(points);
            let columns =
                columns(points.iter().map(part), self.window, self.answer.step_seconds, cells);
            let refusals = points.iter().map(|point| point.refusals).fold(0, u64::saturating_add);
            let peak = points.iter().map(|point| point.memory_peak_bytes).max().unwrap_or(0);
            sheet.row(vec![
                name.into(),
                one.container.as_str().into(),
                if one.live { "lives" } else { "gone" }.into(),
                format_bytes(peak).into(),
                format_bytes(points.last().map_or(0, |point| point.memory_limit_bytes)).into(),
                refusals.to_string().into(),
                percent(got, seconds).into(),
                spark(&columns, |column| column.got).into(),
            ]);
        }
        sheet.lay(&mut self.page);
    }

    /// A line of bars or marks.
    fn marks(&mut self, of: &str, marks: &str) {
        let width = LABEL - 1;
        self.page.push(&format!("{of:>width$} {}\n", marks.trim_end()));
    }

    /// Instants below the bars: their beginning, middle and end.
    fn axis(&mut self, width: usize) {
        let (since, until) = self.window;
        let at = |unix_ms: i64| {
            let all = time_format::utc(unix_ms);
            // The day where there are several, seconds where there are few minutes.
            let shown = match until - since {
                3_600_000..=86_400_000 => 11..16,
                86_400_001.. => 5..16,
                _ => 11..19,
            };
            all.get(shown).unwrap_or_default().to_owned()
        };
        let middle = at(since + (until - since) / 2);
        let (begin, end) = (at(since), at(until));
        let half = width / 2 + middle.len() / 2;
        let left = format!("{begin}{middle:>pad$}", pad = half.saturating_sub(begin.len()));
        let pad = width.saturating_sub(left.chars().count());
        self.page.push(&format!("{:LABEL$}{left}{end:>pad$}\n", ""));
    }

    fn unknown(&mut self, columns: &[Cells]) {
        let unknown = columns.iter().filter(|column| column.seconds <= 0.0).count();
        if unknown > 0 {
            self.page.labelled("  ", &format!("{UNKNOWN} nothing was seen then"));
        }
    }

    fn events(&mut self) {
        let events = &self.answer.events;
        if events.is_empty() {
            return;
        }
        self.page.gap();
        let hidden = events.len().saturating_sub(EVENTS);
        let heading = match hidden {
            0 => "events (UTC):".to_owned(),
            hidden => format!("events (UTC), the last {EVENTS}; {hidden} more in -o json:"),
        };
        self.page.labelled("", &heading);
        let has_days = self.window.1 - self.window.0 > 86_400_000;
        for event in &events[hidden..] {
            let all = time_format::utc(event.at_unix_ms);
            let at = all.get(if has_days { 5 } else { 11 }..).unwrap_or_default().to_owned();
            let of = match event.pod.is_empty() {
                true => &event.gpu_uuid,
                false => &event.pod,
            };
            let of = if of.is_empty() { String::new() } else { format!("{of}: ") };
            self.page.labelled(&format!("  {at} "), &format!("{of}{}", event.text));
        }
    }
}

fn part(point: &TenantPoint) -> (i64, Cells) {
    let share = |seconds: f64| if point.seconds > 0.0 { seconds / point.seconds } else { 0.0 };
    let column = Cells {
        seconds: point.seconds,
        peak: point.memory_peak_bytes,
        got: share(point.used().unwrap_or(0.0)),
        waited: share(point.waited_seconds),
        refusals: point.refusals,
        ..Cells::default()
    };
    (point.at_unix_ms, column)
}

/// Seconds used, waited and observed, of the points of which it is known what was used.
fn totals(points: &[TenantPoint]) -> (f64, f64, f64) {
    let known = points.iter().filter_map(|point| Some((point, point.used()?)));
    known.fold((0.0, 0.0, 0.0), |(sum, waited, seconds), (point, used)| {
        (sum + used, waited + point.waited_seconds, seconds + point.seconds)
    })
}

fn percent(part: f64, whole: f64) -> String {
    if whole > 0.0 { format!("{:.1}%", 100.0 * part / whole) } else { "-".to_owned() }
}
