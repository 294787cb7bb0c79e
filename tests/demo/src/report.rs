//! The end: what each asked, got and tried, and what its neighbour felt.

use tessera_model::quantity::format_bytes;
use tessera_sandbox::container::Means;

use super::division::{self, Division};
use super::latency::Judgement;
use super::play::replicas;
use super::progress::Served;
use super::table::{Table, count, fit, millis};
use super::tenant::{GREEDY_PROCESSES, Part};
use super::verdict::{Facts, Recovery};

/// Everything that is reported.
#[derive(Clone, Copy, Debug)]
pub(super) struct Report<'a> {
    /// What is known of each tenant.
    pub facts: &'a [Facts],
    /// Each tenant's part and GPU.
    pub placed: &'a [(Part, usize)],
    /// How the killed one fared.
    pub recovery: Recovery,
    /// The GPUs, for people.
    pub gpus: &'a [String],
    /// How tenants got their surroundings.
    pub means: Means,
    /// Whether the GPUs are real.
    pub real: bool,
    /// The same load alone, with Tessera and without.
    pub division: &'a [Division],
    /// The verdict on the latencies above it.
    pub judgement: &'a Judgement,
}

impl Report<'_> {
    /// The lines, each at most `width` characters.
    pub fn lines(&self, failures: &[String], width: usize) -> Vec<String> {
        let mut lines = vec![String::new()];
        for table in self.tenants(width) {
            lines.extend(table.lines(width));
            lines.push(String::new());
        }
        lines.pop();
        lines.push(String::new());
        lines.extend(self.neighbour().lines(width));
        lines.push(String::new());
        if !self.division.is_empty() {
            lines.extend(division::table(self.division).lines(width));
            lines.push(String::new());
        }
        let kind = if self.real { "real" } else { "simulated" };
        let again = self.recovery.again_us.map(|us| {
            let later = millis(us);
            format!("crash was started again by the stand-in and held as much {later} later.")
        });
        let mut wrap = |text: String| {
            lines.extend(wrapped(&text, width));
        };
        wrap(again.unwrap_or_default());
        wrap(format!(
            "On {} {kind} GPU{} ({}); the plugin and a stand-in for kubelet over gRPC; Allocate's \
             answer reached tenants by {}. \"Most held\" is NVML's account, contexts included, asked \
             outside the shim.",
            self.gpus.len(),
            if self.gpus.len() == 1 { "" } else { "s" },
            self.gpus.first().map_or("none", String::as_str),
            self.means.describe()
        ));
        if failures.is_empty() {
            wrap(match self.judgement {
                Judgement::Kept(how) => format!("OK: no quota was exceeded, and {how}."),
                Judgement::Open(why) => format!("OK: no quota was exceeded; {why}."),
                Judgement::Broken(_) => "OK: no quota was exceeded.".into(),
            });
        } else {
            for failure in failures {
                wrap(format!("FAILED: {failure}"));
            }
        }
        lines
    }

    /// One table, or two where the terminal is too narrow for all columns.
    fn tenants(&self, width: usize) -> Vec<Table> {
        let whole =
            self.columns(&["TENANT", "ASKED", "GOT", "TRIED", "REFUSED", "MOST HELD", "OUTCOME"]);
        if whole.width() <= width {
            return vec![whole];
        }
        vec![
            self.columns(&["TENANT", "ASKED", "GOT", "MOST HELD"]),
            self.columns(&["TENANT", "TRIED", "REFUSED", "OUTCOME"]),
        ]
    }

    fn columns(&self, headings: &[&'static str]) -> Table {
        let mut table = Table::new(headings);
        for (facts, &(part, gpu)) in self.facts.iter().zip(self.placed) {
            let tries = facts.progress.tries();
            let total = facts.progress.total();
            let (tried, refused, outcome) = match part {
                Part::Serve | Part::ServeLarge => (
                    format!("{} of weights", format_bytes(facts.progress.held())),
                    count(total.out_of_memory),
                    format!("served {} requests", count(total.requests)),
                ),
                Part::Exceed => (
                    format!(
                        "{} times more: {} APIs, {GREEDY_PROCESSES} processes",
                        count(tries.attempts),
                        facts.progress.apis().len()
                    ),
                    count(tries.refused),
                    "held to its quota".to_owned(),
                ),
                Part::Answer | Part::Batch => Default::default(),
                Part::Die => (
                    format!("{}, then SIGKILL", format_bytes(facts.progress.held())),
                    "0".into(),
                    match self.recovery {
                        Recovery { driver_us: Some(us), again_us: Some(_) } => {
                            format!("bytes back in {}", millis(us))
                        }
                        _ => "did not come back".into(),
                    },
                ),
            };
            let outcome =
                if facts.peak > facts.quota { "EXCEEDED ITS QUOTA".into() } else { outcome };
            let cell = |heading: &&str| match *heading {
                "TENANT" => facts.name.to_owned(),
                "ASKED" => replicas(facts.replicas),
                "GOT" => format!("{} on GPU {gpu}", format_bytes(facts.quota)),
                "TRIED" => tried.clone(),
                "REFUSED" => refused.clone(),
                "MOST HELD" => format_bytes(facts.peak),
                _ => outcome.clone(),
            };
            table.row(headings.iter().map(cell).collect());
        }
        table
    }

    /// What the serving tenant felt alone and beside the others.
    fn neighbour(&self) -> Table {
        let mut table = Table::new(&[
            "NEIGHBOUR",
            "REQUESTS",
            "p50",
            "p99",
            "NO MEMORY",
            "ERRORS",
            "VERIFIED",
            "WRONG",
        ]);
        let chat = self.placed.iter().position(|(part, _)| *part == Part::Serve);
        let Some(chat) = chat.and_then(|index| self.facts.get(index)) else { return table };
        let names = ["alone", "beside greedy and crash"];
        for (name, phase) in names.iter().zip(&chat.progress.phases) {
            let Served {
                requests,
                p50_us,
                p99_us,
                p99_at_least_us: _,
                out_of_memory,
                errors,
                corrupted,
                verified_bytes,
            } = *phase;
            table.row(vec![
                format!("{} {name}", chat.name),
                count(requests),
                millis(p50_us),
                millis(p99_us),
                count(out_of_memory),
                count(errors),
                format_bytes(verified_bytes),
                count(corrupted),
            ]);
        }
        table
    }
}

/// `text` in lines of at most `width` characters, broken at spaces.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(fit(word, width)),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Progress;

    #[test]
    fn the_report_fits_any_width() {
        let mut progress = Progress::default();
        for _ in 0..2 {
            progress.take(r#"{"event":"phase","pid":1,"requests":10,"p50_us":20,"p99_us":30}"#);
        }
        let facts =
            Facts { name: "chat", quota: 4 << 30, peak: 3 << 30, progress, ..Facts::default() };
        let report = Report {
            facts: &[facts],
            placed: &[(Part::Serve, 0)],
            recovery: Recovery::default(),
            gpus: &["Simulated GPU, 16 GiB".into()],
            means: Means::Namespace,
            real: false,
            division: &[Division { name: "alone", ..Division::default() }],
            judgement: &Judgement::Kept("a step took 9 ms".into()),
        };
        for width in [30, 60, 80, 120, 200] {
            let lines = report.lines(&["something".into()], width);
            assert!(lines.iter().all(|l| l.chars().count() <= width), "{width}: {lines:#?}");
            assert!(lines.iter().any(|l| l.starts_with("FAILED: something")), "{lines:#?}");
        }
        let lines = report.lines(&[], 200);
        assert!(lines.iter().any(|l| l.starts_with("OK: ")), "{lines:#?}");
        assert!(lines.iter().any(|l| l.starts_with("chat beside")), "{lines:#?}");
    }
}
