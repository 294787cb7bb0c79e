//! What a tenant says of itself, line by line, and what of it counts.

use std::collections::BTreeMap;

use serde_json::Value;

/// Requests served in one stretch of time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Served {
    /// Requests, failed ones included.
    pub requests: u64,
    /// Median latency from arrival, microseconds.
    pub p50_us: u64,
    /// 99th percentile, microseconds.
    pub p99_us: u64,
    /// What of the 99th percentile is no chance of so few requests, microseconds.
    pub p99_at_least_us: u64,
    /// Requests that found no memory.
    pub out_of_memory: u64,
    /// Requests that failed otherwise.
    pub errors: u64,
    /// Requests that read other data than they wrote.
    pub corrupted: u64,
    /// Bytes read back and compared.
    pub verified_bytes: u64,
}

/// Attempts to get memory by one API.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tries {
    /// Requests for memory.
    pub attempts: u64,
    /// Those answered with out of memory.
    pub refused: u64,
}

/// Everything one process of a tenant has said.
#[derive(Clone, Debug, Default)]
struct Process {
    held: u64,
    apis: BTreeMap<String, Tries>,
}

/// Everything a tenant's processes have said.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress {
    processes: BTreeMap<u64, Process>,
    /// Processes that reached their load: memory loaded, or filled.
    pub ready: usize,
    /// The last second.
    pub now: Served,
    /// Closed phases, in order.
    pub phases: Vec<Served>,
}

impl Progress {
    /// Takes one line of `tessera-tenant`; anything else is ignored.
    pub fn take(&mut self, line: &str) {
        let Ok(value) = serde_json::from_str::<Value>(line) else { return };
        let number = |key: &str| value.get(key).and_then(Value::as_u64).unwrap_or(0);
        let process = self.processes.entry(number("pid")).or_default();
        if value.get("held").is_some() {
            process.held = number("held");
        }
        if let Some(apis) = value.get("apis").and_then(Value::as_object) {
            process.apis = apis
                .iter()
                .map(|(name, api)| {
                    let count = |key: &str| api.get(key).and_then(Value::as_u64).unwrap_or(0);
                    let tries = Tries { attempts: count("attempts"), refused: count("refused") };
                    (name.clone(), tries)
                })
                .collect();
        }
        match value.get("event").and_then(Value::as_str) {
            Some("ready" | "full") => self.ready += 1,
            Some("progress") if value.get("p50_us").is_some() => self.now = served(&value),
            Some("phase") => self.phases.push(served(&value)),
            _ => {}
        }
    }

    /// Attempts and refusals by API, over all processes.
    pub fn apis(&self) -> BTreeMap<&str, Tries> {
        let mut sum: BTreeMap<&str, Tries> = BTreeMap::new();
        for process in self.processes.values() {
            for (name, tries) in &process.apis {
                let entry = sum.entry(name).or_default();
                entry.attempts += tries.attempts;
                entry.refused += tries.refused;
            }
        }
        sum
    }

    /// Attempts and refusals in all.
    pub fn tries(&self) -> Tries {
        self.apis().values().fold(Tries::default(), |a, b| Tries {
            attempts: a.attempts + b.attempts,
            refused: a.refused + b.refused,
        })
    }

    /// Bytes that the processes say they hold: what was asked for, overheads aside.
    pub fn held(&self) -> u64 {
        self.processes.values().map(|p| p.held).sum()
    }

    /// All closed phases together, for sums; percentiles are the worst phase's.
    pub fn total(&self) -> Served {
        self.phases.iter().fold(Served::default(), |a, b| Served {
            requests: a.requests + b.requests,
            p50_us: a.p50_us.max(b.p50_us),
            p99_us: a.p99_us.max(b.p99_us),
            p99_at_least_us: a.p99_at_least_us.max(b.p99_at_least_us),
            out_of_memory: a.out_of_memory + b.out_of_memory,
            errors: a.errors + b.errors,
            corrupted: a.corrupted + b.corrupted,
            verified_bytes: a.verified_bytes + b.verified_bytes,
        })
    }
}

fn served(value: &Value) -> Served {
    let number = |key: &str| value.get(key).and_then(Value::as_u64).unwrap_or(0);
    Served {
        requests: number("requests"),
        p50_us: number("p50_us"),
        p99_us: number("p99_us"),
        p99_at_least_us: number("p99_at_least_us"),
        out_of_memory: number("out_of_memory"),
        errors: number("errors"),
        corrupted: number("corrupted"),
        verified_bytes: number("verified_bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_of_several_processes_add_up() {
        let mut progress = Progress::default();
        for pid in [7, 8] {
            for refused in [1, 3] {
                progress.take(&format!(
                    r#"{{"event":"full","pid":{pid},"held":100,"apis":{{"plain":{{"attempts":5,
                    "refused":{refused}}},"async":{{"attempts":2,"refused":2}}}}}}"#
                ));
            }
        }
        assert_eq!(progress.held(), 200);
        assert_eq!(progress.apis()["plain"], Tries { attempts: 10, refused: 6 });
        assert_eq!(progress.tries(), Tries { attempts: 14, refused: 10 });
    }

    #[test]
    fn phases_are_kept_in_order() {
        let mut progress = Progress::default();
        progress.take(r#"{"event":"ready","pid":1,"held":5}"#);
        progress.take(r#"{"event":"progress","pid":1,"requests":3,"p50_us":1,"p99_us":2}"#);
        progress.take(r#"{"event":"phase","pid":1,"requests":10,"p50_us":20,"p99_us":30}"#);
        progress
            .take(r#"{"event":"phase","pid":1,"requests":5,"p50_us":10,"p99_us":90,"errors":2}"#);
        assert_eq!(progress.now.requests, 3);
        assert_eq!(progress.phases[0].p99_us, 30);
        let total = progress.total();
        assert_eq!((total.requests, total.p99_us, total.errors), (15, 90, 2));
    }

    #[test]
    fn what_is_no_report_is_ignored() {
        let mut progress = Progress::default();
        for line in ["", "hello", "[1]", r#"{"event":7}"#] {
            progress.take(line);
        }
        assert_eq!(progress.ready, 0);
        assert_eq!(progress.held(), 0);
    }
}
