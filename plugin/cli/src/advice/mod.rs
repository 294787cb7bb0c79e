//! `recommend` and `waste`: what could be asked for instead, and what is held and not used.

#[cfg(test)]
mod tests;

use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use tessera_api::print::{Cell, Column, Page, Paper, Sheet, Tone};
use tessera_model::clock::unix_ms;
use tessera_model::percent::format_cores;
use tessera_model::quantity::format_bytes;
use tessera_model::{duration, printable, time_format};
use tessera_view::advice::{
    NamespaceWaste, Recommendation, Recommendations, Scope, TenantWaste, Waste,
};

use crate::output::{Format, show};
use crate::source::{Failure, Source};

#[derive(Debug, Args)]
pub(crate) struct RecommendArgs {
    /// The pod whose workload is judged, as NAME or NAMESPACE/NAME; all workloads where none is given
    #[arg(value_name = "POD", conflicts_with = "all")]
    pod: Option<String>,
    /// Only this namespace
    #[arg(long, short, value_name = "NAMESPACE", conflicts_with = "all")]
    namespace: Option<String>,
    /// Every workload; the same as neither a pod nor a namespace
    #[arg(long)]
    all: bool,
    /// How far back, such as 12h or 7d [default: `advice.window`]
    #[arg(long, value_name = "TIME")]
    since: Option<Since>,
    /// Output format
    #[arg(long, short, value_enum, default_value = "text")]
    output: Format,
}

#[derive(Debug, Args)]
pub(crate) struct WasteArgs {
    /// Only this namespace
    #[arg(long, short, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// How far back, such as 12h or 7d: a day and a night
    #[arg(long, value_name = "TIME", default_value = "24h")]
    since: Since,
    /// Output format
    #[arg(long, short, value_enum, default_value = "text")]
    output: Format,
}

pub(crate) async fn recommend(args: &RecommendArgs, source: &Source) -> Result<ExitCode, Failure> {
    let namespace = source.namespace(args.namespace.as_deref());
    let (namespace, pod) = match args.pod.as_deref() {
        Some(pod) => pod.split_once('/').unwrap_or((&namespace, pod)),
        None => (namespace.as_str(), ""),
    };
    let scope = Scope {
        namespace: if args.all { String::new() } else { namespace.to_owned() },
        pod: pod.to_owned(),
        since_unix_ms: args.since.map_or(0, |since| since.before(unix_ms())),
    };
    let advice = source.recommendations(&scope).await?;
    show(&advice, args.output, |paper| recommend_text(&advice, paper))?;
    Ok(known(advice.workloads.is_empty(), &advice.remarks))
}

pub(crate) async fn waste(args: &WasteArgs, source: &Source) -> Result<ExitCode, Failure> {
    let scope = Scope {
        namespace: source.namespace(args.namespace.as_deref()),
        pod: String::new(),
        since_unix_ms: args.since.before(unix_ms()),
    };
    let waste = source.waste(&scope).await?;
    show(&waste, args.output, |paper| waste_text(&waste, paper))?;
    Ok(known(waste.namespaces.is_empty(), &waste.remarks))
}

/// The exit status: 1 where the answer is empty and says why.
fn known(is_empty: bool, remarks: &[String]) -> ExitCode {
    ExitCode::from(u8::from(is_empty && !remarks.is_empty()))
}

/// A name; a dash for none.
fn name(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { text.to_owned() }
}

/// A length of time.
fn length(seconds: f64) -> String {
    // Seconds beyond what an instant can have are nobody's.
    let ms = Duration::try_from_secs_f64(seconds).unwrap_or_default().as_millis();
    time_format::ago(0, i64::try_from(ms).unwrap_or(i64::MAX))
}

const HOUR: u64 = 3600;
const DAY: u64 = 24 * HOUR;

/// A length of time before now: `90m`, `12h`, `7d`, `2w`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Since(Duration);

impl Since {
    /// The instant, Unix milliseconds; at least 1, because 0 stands for the beginning.
    pub fn before(self, now_unix_ms: i64) -> i64 {
        let back = i64::try_from(self.0.as_millis()).unwrap_or(i64::MAX);
        now_unix_ms.saturating_sub(back).max(1)
    }
}

impl FromStr for Since {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_inclusive(|c: char| c.is_ascii_alphabetic());
        let length = parts.map(part).try_fold(Duration::ZERO, |sum, part| sum.checked_add(part?));
        let length = length.filter(|_| !text.is_empty()).ok_or_else(|| {
            format!("\"{text}\" is no length of time; write it like 90m, 12h, 1d12h or 7d")
        })?;
        if length.is_zero() {
            return Err("nothing was seen in no time; write it like 90m, 12h or 7d".to_owned());
        }
        Ok(Since(length))
    }
}

/// A number with its unit.
fn part(text: &str) -> Option<Duration> {
    let days = [("d", DAY), ("w", 7 * DAY)].into_iter().find_map(|(unit, seconds)| {
        let number: u64 = text.strip_suffix(unit)?.parse().ok()?;
        Some(Duration::from_secs(number.checked_mul(seconds)?))
    });
    days.or_else(|| duration::parse(text).ok())
}

const COLUMNS: &[Column] = &[
    Column::name("WORKLOAD").least(20),
    Column::name("CONTAINER").rank(3),
    Column::number("PODS").rank(4),
    Column::number("MEMORY"),
    Column::number("SHARE"),
    Column::number("SAVES").rank(2),
    Column::text("CONFIDENCE").rank(1),
    Column::number("SEEN").rank(5),
];

/// A line for each workload, and for each that should change, why and how.
fn recommend_text(advice: &Recommendations, paper: Paper) -> String {
    let mut page = Page::new(paper);
    page.notes(&advice.remarks);
    if advice.workloads.is_empty() {
        page.say(0, Tone::Plain, "Nothing was seen in that time, and nothing lives: no advice.");
        return page.finish();
    }
    let mut sheet = Sheet::new(COLUMNS);
    advice.workloads.iter().for_each(|one| sheet.row(advice_row(one).map(Cell::from).into()));
    sheet.lay(&mut page);
    let mut out = page.finish();
    for one in &advice.workloads {
        let mut page = Page::new(paper);
        page.gap();
        let container = one.container_and_part();
        let name = format!("{}/{}, container {container}:", one.namespace, one.workload);
        page.say(0, Tone::Plain, &name);
        one.evidence.iter().for_each(|text| page.say(2, Tone::Plain, &format!("- {text}")));
        out.push_str(&page.finish());
        for (i, change) in one.changes.iter().enumerate() {
            // A command is copied whole: it is not wrapped.
            let label = if i == 0 { "  do: " } else { "      " };
            out.push_str(&format!("{label}{}\n", printable::line(&change.text)));
        }
    }
    out
}

fn advice_row(one: &Recommendation) -> [String; 8] {
    [
        format!("{}/{}", one.namespace, one.workload),
        name(&one.container_and_part()),
        one.pods.len().to_string(),
        change(format_bytes(one.memory_limit_bytes), format_bytes(one.memory_bytes)),
        change(format_cores(one.cores_millis), format_cores(one.recommended_cores_millis)),
        saves(one.saves_memory_bytes, one.saves_cores_millis),
        one.confidence.clone(),
        if one.observed_seconds > 0.0 { length(one.observed_seconds) } else { name("") },
    ]
}

fn change(before: String, after: String) -> String {
    if before == after { before } else { format!("{before} → {after}") }
}

fn saves(memory: i64, cores: i64) -> String {
    let sign = |value: i64| if value < 0 { "-" } else { "" };
    let bytes = format!("{}{}", sign(memory), format_bytes(memory.unsigned_abs()));
    let share = format!("{}{}", sign(cores), format_cores(cores.unsigned_abs()));
    match (memory, cores) {
        (0, 0) => "-".to_owned(),
        (_, 0) => bytes,
        (0, _) => share,
        _ => format!("{bytes}, {share}"),
    }
}

const COST: &str = "COST OF WASTE";
const NAMESPACES: &[Column] = &[
    Column::name("NAMESPACE"),
    Column::number("ASKED").rank(1),
    Column::number("USED").rank(1),
    Column::number("WASTED"),
    Column::number(COST),
];
const TENANTS: &[Column] = &[
    Column::name("POD").least(20),
    Column::name("CONTAINER").rank(4),
    Column::number("PEAK OF MEMORY").rank(1),
    Column::number("WANTED OF SHARE").rank(2),
    Column::number("IDLE").rank(1),
    Column::number("WASTED"),
    Column::text("CONFIDENCE").rank(3),
];

/// By namespace, then by container.
fn waste_text(waste: &Waste, paper: Paper) -> String {
    let mut page = Page::new(paper);
    page.notes(&waste.remarks);
    let since = time_format::utc(waste.since_unix_ms);
    if waste.namespaces.is_empty() {
        let text = format!("Since {since} nobody had a share: nothing was wasted.");
        page.say(0, Tone::Plain, &text);
        return page.finish();
    }
    let priced = waste.price_per_gpu_hour > 0.0;
    let price = match priced {
        true => format!(", at {} for a GPU and hour", money(waste.price_per_gpu_hour, waste)),
        false => String::new(),
    };
    page.say(0, Tone::Plain, &format!("Since {since}, in GPU-hours{price}:"));
    page.gap();
    let mut sheet = Sheet::new(NAMESPACES);
    let mut add =
        |one: &NamespaceWaste| sheet.row(namespace_row(one, waste).map(Cell::from).into());
    waste.namespaces.iter().for_each(&mut add);
    if waste.namespaces.len() > 1 {
        let sum = |of: fn(&NamespaceWaste) -> f64| waste.namespaces.iter().map(of).sum();
        add(&NamespaceWaste {
            namespace: "all".to_owned(),
            asked_gpu_hours: sum(|one| one.asked_gpu_hours),
            used_gpu_hours: sum(|one| one.used_gpu_hours),
            cost: sum(|one| one.cost),
            tenants: Vec::new(),
        });
    }
    if !priced {
        sheet = sheet.without(COST);
    }
    sheet.lay(&mut page);
    page.gap();
    let mut sheet = Sheet::new(TENANTS);
    for of in &waste.namespaces {
        for tenant in &of.tenants {
            sheet.row(tenant_row(&of.namespace, tenant).map(Cell::from).into());
        }
    }
    sheet.lay(&mut page);
    page.finish()
}

fn namespace_row(one: &NamespaceWaste, waste: &Waste) -> [String; 5] {
    let hours = |hours: f64| format!("{hours:.1}");
    [
        name(&one.namespace),
        hours(one.asked_gpu_hours),
        hours(one.used_gpu_hours),
        hours(one.asked_gpu_hours - one.used_gpu_hours),
        money(one.cost, waste),
    ]
}

fn money(amount: f64, waste: &Waste) -> String {
    format!("{amount:.2} {}", waste.currency)
}

fn tenant_row(namespace: &str, tenant: &TenantWaste) -> [String; 7] {
    let pod = match tenant.pod.is_empty() {
        true => "-".to_owned(),
        false => format!("{namespace}/{}", tenant.pod),
    };
    let idle = match (tenant.live, tenant.idle_seconds) {
        (false, _) => "gone".to_owned(),
        (true, None) => "-".to_owned(),
        (true, Some(seconds)) => {
            let text = length(seconds);
            if tenant.idle { format!("{text} !") } else { text }
        }
    };
    [
        pod,
        name(&tenant.container),
        format!(
            "{} of {}",
            format_bytes(tenant.memory_peak_bytes),
            format_bytes(tenant.memory_limit_bytes)
        ),
        format!("{} of {}", format_cores(tenant.wanted_millis), format_cores(tenant.cores_millis)),
        idle,
        format!("{:.1}", tenant.wasted_gpu_hours),
        tenant.confidence.clone(),
    ]
}
