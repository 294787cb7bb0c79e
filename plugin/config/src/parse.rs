//! Text to [`Config`]: every key, its type, and what must hold between keys.

mod layout;

use std::path::{Path, PathBuf};
use std::time::Duration;

use toml::Spanned;
use toml::de::DeTable;

use super::metrics::{Metrics, parse_listen};
use super::reader::{Report, Section};
use super::{Config, Gpus, Ledger, Pages, Paths, Problem, Share, Source, choices, log_filter};
use tessera_model::duration;
use tessera_model::quantity::{Quantity, format_bytes};
use tessera_model::replica;

mod delivery;
mod health;
mod leases;

/// What the text says over the defaults, and all that is wrong with it. Where something is, the
/// configuration is what could be read, good for nothing but to find files by.
pub(super) fn parse(text: &str, file: Option<&Path>) -> (Config, Vec<Problem>) {
    let mut report = Report::new(text);
    let (root, syntax) = tolerant(text);
    let config = read(&mut report, root.get_ref());
    let Report { mut problems, lines, .. } = report;
    if !syntax.is_empty() {
        // What follows a syntax error may be misread: one certain report beats ten doubtful ones.
        let mut report = Report::new(text);
        for error in syntax {
            let line = error.span().map(|span| report.line(span.start));
            report.problem("", line, error.message());
        }
        problems = report.problems;
    }
    let problems = problems.finish();
    (Config { source: Source { file: file.map(Path::to_owned), lines }, ..config }, problems)
}

/// Most bytes of a text of which every syntax error is looked for: it may have one at each byte, and the parser
/// keeps them all.
const MENDED: usize = 64 << 10;

/// What of a text can be read, and its syntax errors; of a large text one, and what comes before the first.
fn tolerant(text: &str) -> (Spanned<DeTable<'_>>, Vec<toml::de::Error>) {
    if text.len() <= MENDED {
        return DeTable::parse_recoverable(text);
    }
    match DeTable::parse(text) {
        Ok(table) => (table, Vec::new()),
        Err(error) => (beginning(text), vec![error]),
    }
}

/// What can be read of a text before something is wrong in it, but for the last lines.
fn beginning(text: &str) -> Spanned<DeTable<'_>> {
    let mut table = DeTable::parse_recoverable("").0;
    let mut end = 0;
    while let Some(rest) = text.as_bytes().get(end + MENDED..)
        && let Some(line) = rest.iter().position(|byte| *byte == b'\n')
    {
        end += MENDED + line + 1;
        let (more, errors) = DeTable::parse_recoverable(&text[..end]);
        if !errors.is_empty() {
            break;
        }
        table = more;
    }
    table
}

fn read(report: &mut Report<'_>, table: &DeTable<'_>) -> Config {
    let mut config = Config::default();
    let mut root = Section::root(table);

    let mut section = root.section(report, "resource");
    set(&mut config.resource.name, section.string(report, "name"));
    section.finish(report);
    if let Err(message) = check_resource_name(&config.resource.name) {
        let line = report.lines.get("resource.name").copied();
        report.problem("resource.name", line, message);
    }

    let mut section = root.section(report, "gpus");
    read_gpus(report, &mut section, &mut config.gpus);
    section.finish(report);
    let mut section = root.section(report, "share");
    read_share(report, &mut section, &mut config.share);
    section.finish(report);
    check_share(report, &config);
    layout::read(report, &mut root, &mut config);
    let mut section = root.section(report, "compute");
    leases::read(report, &mut section, &mut config.compute);
    section.finish(report);
    let mut section = root.section(report, "health");
    health::read(report, &mut section, &mut config.health);
    section.finish(report);
    delivery::read(report, &mut root, &mut config);
    let mut section = root.section(report, "paths");
    read_paths(report, &mut section, &mut config.paths);
    section.finish(report);
    let mut section = root.section(report, "pages");
    read_pages(report, &mut section, &mut config.pages);
    section.finish(report);

    let mut section = root.section(report, "ledger");
    set(&mut config.ledger.fsync, section.bool(report, "fsync"));
    read_release_after(report, &mut section, &mut config.ledger);
    section.finish(report);

    let mut section = root.section(report, "kubernetes");
    set(&mut config.kubernetes.events, section.choice(report, "events", &choices::EVENTS));
    section.finish(report);
    let mut section = root.section(report, "metrics");
    read_metrics(report, &mut section, &mut config.metrics);
    section.finish(report);

    let mut section = root.section(report, "labels");
    if let Some(text) = section.string(report, "nfd_file") {
        config.labels.nfd_file = optional_path(report, "labels.nfd_file", text);
    }
    section.finish(report);

    let mut section = root.section(report, "log");
    set(&mut config.log.filter, section.string(report, "filter"));
    set(&mut config.log.format, section.choice(report, "format", &choices::FORMAT));
    section.finish(report);
    if let Err(error) = log_filter::parse(&config.log.filter) {
        let line = report.lines.get("log.filter").copied();
        report.problem("log.filter", line, error);
    }

    root.finish(report);
    config
}

fn read_release_after(report: &mut Report<'_>, section: &mut Section<'_, '_>, ledger: &mut Ledger) {
    let Some(text) = section.string(report, "release_after") else { return };
    let bounds = Duration::from_secs(1)..=Duration::from_secs(3600);
    let parsed = duration::parse(&text).and_then(|length| {
        let fits = bounds.contains(&length);
        fits.then_some(length).ok_or_else(|| format!("\"{text}\" is not from 1s to 1h"))
    });
    match parsed {
        Ok(length) => ledger.release_after = length,
        Err(message) => {
            let line = report.lines.get("ledger.release_after").copied();
            report.problem("ledger.release_after", line, message);
        }
    }
}

fn set<T>(target: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *target = value;
    }
}

fn read_gpus(report: &mut Report<'_>, section: &mut Section<'_, '_>, gpus: &mut Gpus) {
    set(&mut gpus.include, section.strings(report, "include"));
    set(&mut gpus.exclude, section.strings(report, "exclude"));
    set(&mut gpus.reserve_bytes, section.quantity(report, "reserve", Quantity::units));
    set(
        &mut gpus.context_overhead_bytes,
        section.quantity_or_auto(report, "context_overhead", Quantity::units),
    );
    if let Some(slack) = section.quantity(report, "audit_slack", Quantity::units) {
        if slack == 0 {
            let line = report.lines.get("gpus.audit_slack").copied();
            let message = "would flag every container; use what your applications may take beyond \
                           gpus.context_overhead, 1Gi for instance";
            report.problem("gpus.audit_slack", line, message);
        }
        gpus.audit_slack_bytes = slack;
    }
    let words = choices::SOLD_BY_OTHERS;
    set(&mut gpus.sold_by_others, section.choice(report, "sold_by_others", &words));
}

fn read_share(report: &mut Report<'_>, section: &mut Section<'_, '_>, share: &mut Share) {
    if let Some(replicas) = section.integer(report, "replicas") {
        match u32::try_from(replicas) {
            Ok(replicas @ 1..=replica::MAX_PER_GPU) => share.replicas = replicas,
            _ => {
                let line = report.lines.get("share.replicas").copied();
                let most = replica::MAX_PER_GPU;
                report.problem("share.replicas", line, format!("must be from 1 to {most}"));
            }
        }
    }
    set(&mut share.memory_bytes, section.quantity_or_auto(report, "memory", Quantity::units));
    if let Some(cores) = section.quantity_or_auto(report, "cores", Quantity::millis) {
        match cores.map(u32::try_from) {
            None => share.cores_millis = None,
            Some(Ok(millis @ 1..=1000)) => share.cores_millis = Some(millis),
            Some(_) => {
                let line = report.lines.get("share.cores").copied();
                let message = "counts whole GPUs and must be more than 0 and at most 1; \
                               a quarter is \"250m\" or 0.25";
                report.problem("share.cores", line, message);
            }
        }
    }
    set(&mut share.compute, section.choice(report, "compute", &choices::COMPUTE));
    set(&mut share.placement, section.choice(report, "placement", &choices::PLACEMENT));
    set(&mut share.split, section.choice(report, "split", &choices::SPLIT));
}

/// Why no replica can have so little `memory`, whatever GPUs there are.
fn too_little(memory: u64, gpus: &Gpus) -> Option<String> {
    let overhead = gpus.context_overhead_bytes;
    if memory > overhead.unwrap_or(0) {
        return None;
    }
    let than = overhead.map_or_else(
        || "0".to_owned(),
        |overhead| format!("gpus.context_overhead ({})", format_bytes(overhead)),
    );
    Some(format!(
        "{} is not more than {than}: not one CUDA context would fit; raise the memory, or lower \
         context_overhead if your GPUs need less",
        format_bytes(memory),
    ))
}

/// What must hold between keys whatever GPUs there are; the rest is `tessera_rules::capacity`'s.
fn check_share(report: &mut Report<'_>, config: &Config) {
    let Config { share, gpus, .. } = config;
    if let Some(message) = share.memory_bytes.and_then(|memory| too_little(memory, gpus)) {
        let line = report.lines.get("share.memory").copied();
        report.problem("share.memory", line, message);
    }
    if let Some(cores) = share.cores_millis
        && u64::from(cores) * u64::from(share.replicas) > 1000
    {
        let line = report.lines.get("share.cores").copied();
        let message = format!(
            "{} replicas of {cores}m are more than one GPU (1000m); lower cores or replicas",
            share.replicas,
        );
        report.problem("share.cores", line, message);
    }
}

fn read_paths(report: &mut Report<'_>, section: &mut Section<'_, '_>, paths: &mut Paths) {
    let Paths {
        kubelet,
        pod_resources,
        container_logs,
        pages,
        shim,
        shim_source,
        ledger,
        admin,
        nvml,
    } = paths;
    for (key, full, target) in [
        ("kubelet", "paths.kubelet", kubelet),
        ("pod_resources", "paths.pod_resources", pod_resources),
        ("container_logs", "paths.container_logs", container_logs),
        ("pages", "paths.pages", pages),
        ("shim", "paths.shim", shim),
        ("ledger", "paths.ledger", ledger),
        ("admin", "paths.admin", admin),
    ] {
        if let Some(text) = section.string(report, key) {
            *target = PathBuf::from(text);
            check_absolute(report, full, target);
        }
    }
    for (key, full, target) in
        [("shim_source", "paths.shim_source", shim_source), ("nvml", "paths.nvml", nvml)]
    {
        if let Some(text) = section.string(report, key) {
            *target = optional_path(report, full, text);
        }
    }
}

fn read_pages(report: &mut Report<'_>, section: &mut Section<'_, '_>, pages: &mut Pages) {
    set(&mut pages.tmpfs, section.choice(report, "tmpfs", &choices::TMPFS));
    set(&mut pages.size_bytes, section.quantity(report, "size", Quantity::units));
    if pages.size_bytes < 1 << 20 {
        let line = report.lines.get("pages.size").copied();
        report.problem("pages.size", line, "must be at least 1Mi; one allocation takes 140 KiB");
    }
}

fn read_metrics(report: &mut Report<'_>, section: &mut Section<'_, '_>, metrics: &mut Metrics) {
    match section.string(report, "listen").map(|text| parse_listen(&text)) {
        None => {}
        Some(Ok(listen)) => metrics.listen = listen,
        Some(Err(message)) => {
            let line = report.lines.get("metrics.listen").copied();
            report.problem("metrics.listen", line, message);
        }
    }
}

/// An empty string means "not set".
fn optional_path(report: &mut Report<'_>, key: &str, text: String) -> Option<PathBuf> {
    if text.is_empty() {
        return None;
    }
    let path = PathBuf::from(text);
    check_absolute(report, key, &path);
    Some(path)
}

fn check_absolute(report: &mut Report<'_>, key: &str, path: &Path) {
    if !path.is_absolute() {
        let line = report.lines.get(key).copied();
        report.problem(key, line, format!("\"{}\" must be an absolute path", path.display()));
    }
}

/// An extended resource's name: a DNS subdomain, a slash, a name of at most 63 characters; not
/// under `kubernetes.io`. See "Extended resources" in the Kubernetes documentation.
fn check_resource_name(name: &str) -> Result<(), String> {
    let hint = "; write it like \"tessera.dev/gpu\"";
    let Some((domain, leaf)) = name.split_once('/') else {
        return Err(format!("\"{name}\" has no domain{hint}"));
    };
    let label = |text: &str, extra: &[u8]| {
        let bytes = text.as_bytes();
        let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
        bytes.len() <= 63
            && edge(bytes.first())
            && edge(bytes.last())
            && bytes.iter().all(|b| b.is_ascii_alphanumeric() || extra.contains(b))
    };
    let lower = !domain.bytes().any(|byte| byte.is_ascii_uppercase());
    // `requests.` and the domain together name a quota, which must still be a valid name.
    if domain.len() > 244 || !lower || !domain.split('.').all(|part| label(part, b"-")) {
        return Err(format!("\"{domain}\" is not a DNS name in lower case{hint}"));
    }
    if !label(leaf, b"-_.") {
        return Err(format!("\"{leaf}\" is not a resource name of at most 63 characters{hint}"));
    }
    if domain == "kubernetes.io" || domain.ends_with(".kubernetes.io") {
        return Err(format!("kubernetes.io belongs to Kubernetes{hint}"));
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests;
