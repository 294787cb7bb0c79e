//! `kubectl tessera top`: pods of all nodes, live.

use std::collections::BTreeSet;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use tessera_fleet::Fleet as Cluster;
use tessera_model::counted::plural;
use tessera_model::percent::{format_cores, format_used};
use tessera_model::quantity::format_bytes;
use tessera_model::{duration, printable};
use tessera_system::terminal;
use tessera_view::fleet::Fleet;
use tessera_view::node::Node;
use tessera_view::tenant::Tenant;

use super::columns::{self, WIDTH, gives, left, right};
use super::failure::{self, Failure};
use super::options::{Common, Format};
use super::scope;

/// Shortest interval.
const LEAST: Duration = Duration::from_secs(1);

/// Arguments of `kubectl tessera top`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// How often to ask, at least 1s
    #[arg(long, short, value_name = "TIME", default_value = "2s", value_parser = interval)]
    interval: Duration,
    /// Print one frame and end, as into a pipe
    #[arg(long)]
    once: bool,
    /// Output format
    #[arg(long, short, value_enum, default_value = "text")]
    output: Format,
    /// What to sort by
    #[arg(long, short, value_enum, default_value = "memory")]
    sort: Sort,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Sort {
    /// Memory, the most first
    Memory,
    /// GPU time used, the most first
    Share,
    /// Requests refused, the most first
    Refusals,
    /// Namespace and pod
    Name,
}

fn interval(text: &str) -> Result<Duration, String> {
    crate::top::at_least(LEAST, text)
}

pub(super) async fn main(
    cluster: &Cluster,
    common: &Common,
    args: &Args,
) -> Result<ExitCode, Failure> {
    let namespace = common.namespace(cluster);
    let live = !args.once && args.output != Format::Json && std::io::stdout().is_terminal();
    if live {
        return watch(cluster, &namespace, args).await;
    }
    let fleet = scope::narrowed(cluster.gather().await?, &namespace);
    let (silent, any) = scope::silent(&fleet);
    match args.output {
        Format::Json => super::print_json(&fleet)?,
        format => {
            super::print(&frame(
                &fleet,
                &namespace,
                args.sort,
                format == Format::Wide,
                usize::MAX,
            ))?;
            silent.iter().for_each(|text| eprintln!("! {}", printable::line(text)));
        }
    }
    Ok(if any { ExitCode::SUCCESS } else { failure::unanswered(cluster) })
}

/// Frame after frame on the terminal's other screen, until Ctrl-C.
async fn watch(cluster: &Cluster, namespace: &str, args: &Args) -> Result<ExitCode, Failure> {
    use tokio::signal::unix::{SignalKind, signal};
    let signals = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
    let signals: std::io::Result<Vec<_>> = signals.into_iter().map(signal).collect();
    let mut signals = signals.map_err(|error| Failure::failed(error.to_string()))?;
    let mut ended = Box::pin(std::future::poll_fn(move |context| {
        let come = signals.iter_mut().any(|signal| signal.poll_recv(context).is_ready());
        if come { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    }));
    let screen = Screen::take()?;
    let mut last: Option<Fleet> = None;
    loop {
        let gathered = tokio::select! {
            gathered = cluster.gather() => gathered,
            () = &mut ended => break,
        };
        let (width, height) = terminal::size().unwrap_or((120, 40));
        let mut text = match gathered {
            Ok(fleet) => {
                let fleet = scope::narrowed(fleet, namespace);
                let mut text =
                    frame(&fleet, namespace, args.sort, args.output == Format::Wide, width.into());
                for line in scope::silent(&fleet).0 {
                    text.push_str(&format!("! {line}\n"));
                }
                last = Some(fleet);
                text
            }
            // What was known stays to be seen.
            Err(error) => {
                let known = last
                    .as_ref()
                    .map(|fleet| frame(fleet, namespace, args.sort, false, width.into()));
                format!("! {error}\n{}", known.unwrap_or_default())
            }
        };
        text.push_str(&format!("every {}, Ctrl-C ends\n", duration::format(args.interval)));
        screen.show(&text, usize::from(width), usize::from(height))?;
        tokio::select! {
            () = tokio::time::sleep(args.interval) => {}
            () = &mut ended => break,
        }
    }
    drop(screen);
    Ok(ExitCode::SUCCESS)
}

/// The terminal's other screen; the first comes back when it is dropped.
struct Screen;

impl Screen {
    fn take() -> Result<Self, Failure> {
        write("\x1b[?1049h\x1b[?25l").map(|()| Screen)
    }

    fn show(&self, text: &str, width: usize, height: usize) -> Result<(), Failure> {
        let mut out = String::from("\x1b[H");
        for line in text.lines().take(height.saturating_sub(1)) {
            let line: String = printable::line(line).chars().take(width).collect();
            out.push_str(&format!("{line}\x1b[K\r\n"));
        }
        out.push_str("\x1b[J");
        write(&out)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A terminal that is gone needs nothing back.
        let _ = write("\x1b[?25h\x1b[?1049l");
    }
}

fn write(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    let done = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    done.map_err(|error| Failure::failed(format!("the terminal: {error}")))
}

fn frame(fleet: &Fleet, namespace: &str, sort: Sort, wide: bool, width: usize) -> String {
    let mut tenants: Vec<(&str, &Tenant)> = fleet
        .nodes
        .iter()
        .flat_map(|entry| {
            entry
                .view
                .iter()
                .flat_map(|view| view.tenants.iter().map(|tenant| (entry.node.as_str(), tenant)))
        })
        .collect();
    let name =
        |tenant: &Tenant| (tenant.namespace.clone(), tenant.pod.clone(), tenant.container.clone());
    tenants.sort_by(|(_, a), (_, b)| {
        let order = match sort {
            Sort::Memory => used(b).cmp(&used(a)),
            Sort::Share => used_time(b).cmp(&used_time(a)),
            Sort::Refusals => b.refusals.cmp(&a.refusals),
            Sort::Name => std::cmp::Ordering::Equal,
        };
        order.then_with(|| name(a).cmp(&name(b)))
    });
    let rows: Vec<Vec<String>> =
        tenants.iter().flat_map(|(node, tenant)| rows(fleet, node, tenant, wide)).collect();
    let whose = if namespace.is_empty() {
        "all namespaces".to_owned()
    } else {
        format!("namespace {namespace}")
    };
    let hidden = match namespace {
        "" => hidden(fleet),
        _ => 0,
    };
    let beside = match hidden {
        0 => String::new(),
        hidden => format!(", and {hidden} that you may not see"),
    };
    let title = format!(
        "{}: {} of {whose}{beside}\n",
        printable::line(&fleet.name),
        plural(tenants.len(), "tenant")
    );
    if rows.is_empty() {
        return title;
    }
    let columns = [
        gives("POD"),
        gives("CONTAINER"),
        gives("NODE"),
        left("GPU"),
        right("USED"),
        right("QUOTA"),
        right("SHARE"),
        right("USED 10s"),
        left("WAITS"),
        right("REFUSED"),
    ];
    let width = if wide { usize::MAX } else { width.min(WIDTH) };
    title + &columns::table(&columns, &rows, width)
}

/// Tenants of which the reader sees totals alone.
fn hidden(fleet: &Fleet) -> u64 {
    let views = fleet.nodes.iter().filter_map(|entry| entry.view.as_ref());
    views.map(Node::hidden).sum()
}

/// Further pods that share its claim, and so its namespace.
fn others(tenant: &Tenant) -> String {
    let pods = tenant.other_holders.iter().filter_map(|holder| holder.split('/').nth(1));
    let pods: BTreeSet<&str> = pods.filter(|pod| *pod != tenant.pod).collect();
    pods.iter().map(|pod| format!(", {pod}")).collect()
}

fn used(tenant: &Tenant) -> u64 {
    tenant.gpus.iter().map(|one| one.memory_used_bytes).fold(0, u64::saturating_add)
}

fn used_time(tenant: &Tenant) -> u32 {
    tenant.compute.as_ref().and_then(|compute| compute.used_10s_millis).unwrap_or(0)
}

fn rows(fleet: &Fleet, node: &str, tenant: &Tenant, wide: bool) -> Vec<Vec<String>> {
    let view =
        fleet.nodes.iter().find(|entry| entry.node == node).and_then(|entry| entry.view.as_ref());
    let gpu = |uuid: &str| match view.and_then(|view| view.gpus.iter().find(|gpu| gpu.uuid == uuid))
    {
        Some(gpu) if !wide => gpu.index.to_string(),
        _ if wide => uuid.to_owned(),
        _ => "gone".to_owned(),
    };
    let pod = match tenant.pod.as_str() {
        "" => tenant.id.clone(),
        pod => format!("{}/{pod}{}", tenant.namespace, others(tenant)),
    };
    let compute = tenant.compute.as_ref();
    let row = |(at, one): (usize, &tessera_view::tenant::Use)| {
        let first = |text: String| if at == 0 { text } else { String::new() };
        let waits = match compute.map(|compute| (compute.waiting_us, compute.gate.as_str())) {
            Some((Some(us), _)) => duration::format(Duration::from_millis(us / 1000)),
            _ => "-".to_owned(),
        };
        vec![
            first(pod.clone()),
            first(tenant.container.clone()),
            first(node.to_owned()),
            gpu(&one.gpu_uuid),
            format_bytes(one.memory_used_bytes),
            format_bytes(one.memory_limit_bytes),
            if one.cores_millis == 0 { "-".to_owned() } else { format_cores(one.cores_millis) },
            first(compute.map_or_else(|| "-".to_owned(), |one| format_used(one.used_10s_millis))),
            first(waits),
            first(tenant.refusals.to_string()),
        ]
    };
    tenant.gpus.iter().enumerate().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_view::fleet::Entry;
    use tessera_view::node::{Node, Others};
    use tessera_view::tenant::Use;

    #[test]
    fn pods_that_share_a_claim_are_all_shown() {
        let tenant = Tenant {
            namespace: "team".into(),
            pod: "chat-0".into(),
            other_holders: vec!["team/chat-0/side".into(), "team/chat-1/main".into()],
            gpus: vec![Use::default()],
            ..Tenant::default()
        };
        assert_eq!(rows(&Fleet::default(), "a", &tenant, false)[0][0], "team/chat-0, chat-1");
    }

    #[test]
    fn tenants_of_all_nodes_stand_in_one_order() {
        let tenant = |pod: &str, used: u64| Tenant {
            namespace: "team".into(),
            pod: pod.into(),
            gpus: vec![Use {
                memory_charged_bytes: used,
                memory_limit_bytes: 8 << 30,
                ..Use::default()
            }],
            ..Tenant::default()
        };
        let entry = |node: &str, tenants| Entry {
            node: node.into(),
            answers: true,
            view: Some(Node { tenants, ..Node::default() }),
            ..Entry::default()
        };
        let nodes = vec![
            entry("a", vec![tenant("small", 1 << 20), tenant("x\u{1b}[2J", 0)]),
            entry("b", vec![tenant("large", 1 << 30)]),
        ];
        let fleet = Fleet { name: "prod".into(), nodes, ..Fleet::default() };
        let text = frame(&fleet, "team", Sort::Memory, false, 120);
        let at = |name: &str| text.find(name).unwrap();
        assert!(text.starts_with("prod: 3 tenants of namespace team\n"), "{text}");
        assert!(at("team/large") < at("team/small"), "{text}");
        assert!(!text.contains('\u{1b}'));
        let mut narrow = fleet.clone();
        let others = Others { tenants: 2, ..Others::default() };
        narrow.nodes[1].view = Some(Node { others: vec![others], ..Node::default() });
        let text = frame(&narrow, "", Sort::Memory, false, 120);
        let title = "prod: 2 tenants of all namespaces, and 2 that you may not see\n";
        assert!(text.starts_with(title), "{text}");
        let text = frame(&narrow, "team", Sort::Memory, false, 120);
        assert!(text.starts_with("prod: 2 tenants of namespace team\n"), "{text}");
        let text = frame(&fleet, "", Sort::Name, false, 60);
        assert!(text.lines().all(|line| line.chars().count() <= 90), "{text}");
    }
}
