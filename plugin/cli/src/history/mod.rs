//! `history`: what was, as a chart in the terminal, or for programs.

mod chart;
mod text;

use std::process::ExitCode;

use chart::Style;
use tessera_api::print::{Page, Paper};
use tessera_model::clock::unix_ms;
use tessera_model::time_format;
use tessera_system::terminal;
use tessera_view::history::{Answer, Query};

use crate::advice::Since;
use crate::output::{TableFormat, quoted, show_table};
use crate::source::{Failure, Source, by_node, subject};

/// Columns where standard output is no terminal.
const COLUMNS: usize = 100;
/// Tenants with charts of their own.
const CHARTS: usize = 4;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A pod (NAME or NAMESPACE/NAME), a container, an allocation id, a GPU's UUID or index; of ids the first
    /// four characters are enough. All GPUs where it is left out
    #[arg(value_name = "POD|ALLOCATION|GPU")]
    subject: Option<String>,
    /// Only this namespace
    #[arg(long, short, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// From how long ago, such as 90m, 12h or 7d
    #[arg(long, value_name = "TIME", default_value = "6h")]
    since: Since,
    /// Until how long ago [default: now]
    #[arg(long, value_name = "TIME")]
    until: Option<Since>,
    /// Length of a bucket; the finest that is known for all of that time where it is left out
    #[arg(long, value_enum, value_name = "TIME")]
    step: Option<Step>,
    /// Output format
    #[arg(long, short, value_enum, default_value = "text")]
    output: TableFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Step {
    /// Ten seconds
    #[value(name = "10s")]
    Fine,
    /// Five minutes
    #[value(name = "5m")]
    Middle,
    /// One hour
    #[value(name = "1h")]
    Coarse,
}

impl Args {
    fn query(&self, source: &Source, now_unix_ms: i64) -> Query {
        let namespace = source.namespace(self.namespace.as_deref());
        let asked = self.subject.clone().unwrap_or_default();
        let subject = match source {
            // It knows indexes and containers, too.
            Source::Node(_) => asked.clone(),
            Source::Cluster(..) => subject(&asked, &namespace),
        };
        // A subject that says its namespace, and a GPU, which has none, are of no other.
        let is_whole =
            asked.contains('/') || matches!(source, Source::Cluster(..)) && subject == asked;
        Query {
            namespace: if is_whole && !asked.is_empty() { String::new() } else { namespace },
            subject,
            since_unix_ms: self.since.before(now_unix_ms),
            until_unix_ms: self.until.map_or(0, |until| until.before(now_unix_ms)),
            step_seconds: match self.step {
                None => 0,
                Some(Step::Fine) => 10,
                Some(Step::Middle) => 300,
                Some(Step::Coarse) => 3600,
            },
        }
    }
}

pub(crate) async fn main(args: &Args, source: &Source) -> Result<ExitCode, Failure> {
    let asked = args.query(source, unix_ms());
    let answers = source.histories(&asked).await?;
    let json = by_node(source, &answers, |_, answer| serde_json::json!(answer))?;
    let size = terminal::size();
    let look = terminal::Look::from_env();
    let style = Style {
        width: size.map_or(COLUMNS, |(columns, _)| usize::from(columns)),
        unicode: look.unicode,
        colour: look.colour && size.is_some(),
    };
    // Of a whole namespace on many nodes, a line for each.
    let charts = match source {
        Source::Cluster(..) if asked.subject.is_empty() => 0,
        _ => CHARTS,
    };
    let (answers, silent) = answers;
    let text = |paper: Paper| {
        let mut page = Page::new(paper);
        for (node, answer) in &answers {
            if !node.is_empty() {
                page.labelled("", &format!("On node {node}:"));
            }
            page.push(&text::text(answer, &asked, style, charts));
        }
        page.notes(&silent);
        page.finish()
    };
    show_table(&json, args.output, text, || csv(answers.iter().map(|(_, answer)| answer)))?;
    Ok(ExitCode::SUCCESS)
}

/// Tenants' buckets, then GPUs'; what does not apply is empty.
fn csv<'a>(answers: impl Iterator<Item = &'a Answer>) -> String {
    let mut out = String::from(
        "of,node,gpu_uuid,namespace,pod,container,workload,id,generation,live,at,step_seconds,seconds,\
         memory_used_bytes,memory_peak_bytes,memory_limit_bytes,memory_overhead_bytes,cores_millis,got_seconds,\
         waited_seconds,capped_seconds,rationed_seconds,refusals,launches,unhealthy_seconds,cordoned_seconds,\
         used_peak_millis,used_seconds,measured_seconds\r\n",
    );
    answers.for_each(|answer| rows(&mut out, answer));
    out
}

fn rows(out: &mut String, answer: &Answer) {
    let step = answer.step_seconds;
    for one in &answer.tenants {
        let names =
            [&one.gpu_uuid, &one.namespace, &one.pod, &one.container, &one.workload, &one.id]
                .map(|name| quoted(name))
                .join(",");
        for point in &one.points {
            out.push_str(&format!(
                "tenant,{},{names},{},{},{},{step},{:.3},{},{},{},{},{},{:.4},{:.4},{:.4},{:.4},{},{},,,{},{:.4},{:.4}\r\n",
                quoted(&answer.node),
                one.generation,
                one.live,
                time_format::rfc3339(point.at_unix_ms),
                point.seconds,
                point.memory_used_bytes,
                point.memory_peak_bytes,
                point.memory_limit_bytes,
                point.memory_overhead_bytes,
                point.cores_millis,
                point.got_seconds,
                point.waited_seconds,
                point.capped_seconds,
                point.rationed_seconds,
                point.refusals,
                point.launches,
                point.used_peak_millis,
                point.used_seconds,
                point.measured_seconds,
            ));
        }
    }
    for one in &answer.gpus {
        for point in &one.points {
            out.push_str(&format!(
                "gpu,{},{},,,,,,,,{},{step},{:.3},{},{},{},,,{:.4},,,,,,{:.3},{:.3},{},,\r\n",
                quoted(&answer.node),
                quoted(&one.gpu_uuid),
                time_format::rfc3339(point.at_unix_ms),
                point.seconds,
                point.memory_used_bytes,
                point.memory_peak_bytes,
                point.memory_limits_bytes,
                point.leased_seconds,
                point.unhealthy_seconds,
                point.cordoned_seconds,
                point.leased_peak_millis,
            ));
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
