//! `kubectl tessera history`.

use std::process::ExitCode;

use tessera_fleet::Fleet;
use tessera_model::clock::unix_ms;
use tessera_model::quantity::format_bytes;
use tessera_model::time_format;
use tessera_view::history::{Answer, Query, TenantPoint};

use super::advice::remarks;
use super::columns::{self, WIDTH, gives, left, right};
use super::failure::Failure;
use super::options::{Common, Format};
use super::scope;
use crate::advice::Since;

/// Cells of a picture.
const CELLS: usize = 24;
/// Events that are shown; JSON has all.
const EVENTS: usize = 20;

/// Arguments of `kubectl tessera history`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A pod (NAME or NAMESPACE/NAME), an allocation's id or a GPU's UUID; all of the namespace where it is left out
    #[arg(value_name = "POD|ALLOCATION|GPU")]
    subject: Option<String>,
    /// From how long ago, such as 90m, 12h or 7d
    #[arg(long, value_name = "TIME", default_value = "6h")]
    since: Since,
    /// Output format
    #[arg(long, short, value_enum, default_value = "text")]
    output: Format,
}

pub(super) async fn main(fleet: &Fleet, common: &Common, args: &Args) -> Result<ExitCode, Failure> {
    let namespace = common.namespace(fleet);
    let node = common.one_node()?;
    let asked = args.subject.as_deref().unwrap_or_default();
    let subject = if asked.is_empty() { String::new() } else { scope::subject(asked, &namespace) };
    let is_pod = subject.is_empty() || subject.contains('/');
    let query = Query {
        // A GPU is of no namespace.
        namespace: if is_pod && !asked.contains('/') { namespace } else { String::new() },
        subject,
        since_unix_ms: args.since.before(unix_ms()),
        ..Query::default()
    };
    let (answered, silent) = tessera_fleet::answered(fleet.histories(node, &query).await?)?;
    if args.output == Format::Json {
        let answers: Vec<&Answer> = answered.iter().map(|(_, answer)| answer).collect();
        super::print_json(
            &serde_json::json!({ "api_version": tessera_view::API_VERSION, "nodes": answers, "remarks": silent }),
        )?;
        return Ok(ExitCode::SUCCESS);
    }
    let window = (query.since_unix_ms, unix_ms());
    let mut out = String::new();
    for (node, answer) in &answered {
        out.push_str(&match query.subject.is_empty() {
            true => text(node, answer, window, args.output == Format::Wide),
            false => format!("On node {node}:\n{}", crate::history::plain(answer, &query)),
        });
    }
    remarks(&mut out, &silent);
    super::print(&out)?;
    Ok(ExitCode::SUCCESS)
}

fn text(node: &str, answer: &Answer, window: (i64, i64), wide: bool) -> String {
    let rows: Vec<Vec<String>> = answer
        .tenants
        .iter()
        .map(|tenant| {
            let used = |point: &TenantPoint| match point.memory_limit_bytes {
                0 => 0.0,
                limit => ratio(point.memory_used_bytes, limit),
            };
            let got = |point: &TenantPoint| match point.seconds > 0.0 {
                true => point.used().unwrap_or(0.0) / point.seconds,
                false => 0.0,
            };
            let cells = |of: &dyn Fn(&TenantPoint) -> f64| {
                picture(tenant.points.iter().map(|point| (point.at_unix_ms, of(point))), window)
            };
            let points = &tenant.points;
            vec![
                format!("{}/{}", tenant.namespace, tenant.pod),
                tenant.container.clone(),
                if tenant.live { "lives".to_owned() } else { "gone".to_owned() },
                format_bytes(points.iter().map(|point| point.memory_peak_bytes).max().unwrap_or(0)),
                format_bytes(points.last().map_or(0, |point| point.memory_limit_bytes)),
                cells(&used),
                cells(&got),
                points.iter().map(|point| point.refusals).fold(0, u64::saturating_add).to_string(),
            ]
        })
        .collect();
    let mut out =
        format!("Node {node}, {} to {}:\n", time_format::utc(window.0), time_format::utc(window.1));
    let columns = [
        gives("POD"),
        gives("CONTAINER"),
        left("NOW"),
        right("PEAK"),
        right("QUOTA"),
        left("MEMORY OF QUOTA"),
        left("GPU TIME"),
        right("REFUSED"),
    ];
    match rows.is_empty() {
        true => out.push_str("no tenant was seen\n"),
        false => {
            out.push_str(&columns::table(&columns, &rows, if wide { usize::MAX } else { WIDTH }))
        }
    }
    let hidden = answer.events.len().saturating_sub(EVENTS);
    for event in &answer.events[hidden..] {
        let line =
            format!("{}  {}  {}\n", time_format::utc(event.at_unix_ms), event.pod, event.text);
        out.push_str(&tessera_model::printable::line(line.trim_end()));
        out.push('\n');
    }
    remarks(&mut out, &answer.remarks);
    out.push('\n');
    out
}

#[allow(clippy::cast_precision_loss, reason = "a part of a whole, for a picture")]
fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}

/// The highest value of each cell of the window, parts of one, as bars; a gap where nothing was seen.
fn picture(points: impl Iterator<Item = (i64, f64)>, window: (i64, i64)) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let mut cells = [None; CELLS];
    let length = window.1.saturating_sub(window.0).max(1);
    for (at, value) in points {
        let past = at.saturating_sub(window.0);
        let Ok(past) = u128::try_from(past) else { continue };
        let place = past * CELLS as u128 / u128::try_from(length).unwrap_or(1);
        let Some(cell) = usize::try_from(place).ok().and_then(|place| cells.get_mut(place)) else {
            continue;
        };
        let most: &mut Option<f64> = cell;
        *most = Some(most.map_or(value, |known: f64| known.max(value)));
    }
    let bar = |value: f64| {
        let steps = [0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875];
        BARS[steps.iter().filter(|step| value > **step).count()]
    };
    cells.iter().map(|cell| cell.map_or('·', bar)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_has_a_bar_where_something_was_seen() {
        let text = picture(
            [(0, 0.0), (500, 1.0), (990, 0.5), (-5, 1.0), (5000, 1.0)].into_iter(),
            (0, 1000),
        );
        assert_eq!(text.chars().count(), CELLS);
        let bars: Vec<char> = text.chars().collect();
        assert_eq!((bars[0], bars[12], bars[23], bars[5]), ('▁', '█', '▄', '·'));
        assert_eq!(picture(std::iter::empty(), (5, 5)), "·".repeat(CELLS));
    }
}
