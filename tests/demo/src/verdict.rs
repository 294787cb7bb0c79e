//! Whether Tessera kept its promises: judged by the driver's account, not by the shim's.

use tessera_model::quantity::format_bytes;

use super::progress::{Progress, Served};

/// What is known of one tenant at the end.
#[derive(Clone, Debug, Default)]
pub(super) struct Facts {
    /// Name.
    pub name: &'static str,
    /// Replicas it asked for.
    pub replicas: usize,
    /// What it was given, bytes.
    pub quota: u64,
    /// The most that the driver ever showed for it, bytes.
    pub peak: u64,
    /// Whether its part was to be refused.
    pub expects_refusals: bool,
    /// More than one replica's quota: its weights need the others.
    pub one_replica: Option<u64>,
    /// What it said.
    pub progress: Progress,
    /// Exit code of its last process, where it ended by itself.
    pub exit: Option<i32>,
}

/// How the killed tenant fared.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Recovery {
    /// SIGKILL to the driver's account showing nothing of it, microseconds.
    pub driver_us: Option<u64>,
    /// SIGKILL to its successor in the same allocation holding as much again, microseconds.
    pub again_us: Option<u64>,
}

/// All that was not as promised; empty where everything was.
pub(super) fn failures(tenants: &[Facts], recovery: Recovery) -> Vec<String> {
    let mut failures = Vec::new();
    for tenant in tenants {
        let name = tenant.name;
        if tenant.peak > tenant.quota {
            failures.push(format!(
                "{name} exceeded its quota: the driver showed {} of {} ({} bytes over)",
                format_bytes(tenant.peak),
                format_bytes(tenant.quota),
                tenant.peak - tenant.quota
            ));
        }
        if tenant.peak == 0 {
            failures.push(format!("{name} never held any memory: it proves nothing"));
        }
        if tenant.expects_refusals {
            for (api, tries) in tenant.progress.apis() {
                if tries.refused == 0 {
                    failures.push(format!("{name} was never refused by the {api} API"));
                }
            }
            if tenant.progress.tries().attempts == 0 {
                failures.push(format!("{name} never tried to exceed its quota"));
            }
        } else {
            failures.extend(harm(name, &tenant.progress.total()));
        }
        if let Some(one) = tenant.one_replica.filter(|&one| tenant.progress.held() <= one) {
            failures.push(format!(
                "{name} held {}, which one replica ({}) would have given it",
                format_bytes(tenant.progress.held()),
                format_bytes(one)
            ));
        }
        match tenant.exit {
            Some(0) | None => {}
            Some(code) => failures.push(format!("{name} ended with exit code {code}")),
        }
    }
    if recovery.driver_us.is_none() {
        failures.push("the killed tenant's bytes did not come back".into());
    }
    if recovery.again_us.is_none() {
        failures.push("the killed tenant could not take its share again".into());
    }
    failures
}

fn harm(name: &str, served: &Served) -> Vec<String> {
    let mut failures = Vec::new();
    let mut tell = |count: u64, what: &str| {
        if count > 0 {
            failures.push(format!("{name} was harmed: {count} requests {what}"));
        }
    };
    tell(served.out_of_memory, "found no memory within its quota");
    tell(served.errors, "failed");
    tell(served.corrupted, "read wrong data");
    failures
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept() -> Facts {
        let mut progress = Progress::default();
        progress.take(r#"{"event":"ready","pid":1,"held":50}"#);
        progress.take(r#"{"event":"phase","pid":1,"requests":10,"p50_us":20,"p99_us":30}"#);
        Facts { name: "chat", quota: 100, peak: 80, progress, ..Facts::default() }
    }

    fn recovered() -> Recovery {
        Recovery { driver_us: Some(10), again_us: Some(20) }
    }

    #[test]
    fn nothing_is_said_where_all_is_kept() {
        assert_eq!(failures(&[kept()], recovered()), Vec::<String>::new());
    }

    #[test]
    fn one_byte_over_the_quota_fails() {
        let over = Facts { peak: 101, ..kept() };
        let failures = failures(&[over], recovered());
        assert_eq!(failures.len(), 1);
        assert!(failures[0].contains("1 bytes over"), "{failures:?}");
    }

    #[test]
    fn a_harmed_neighbour_fails() {
        for line in ["out_of_memory", "errors", "corrupted"] {
            let mut harmed = kept();
            harmed.progress.take(&format!(r#"{{"event":"phase","pid":1,"{line}":2}}"#));
            let failures = failures(&[harmed], recovered());
            assert!(failures.len() == 1 && failures[0].contains("harmed"), "{failures:?}");
        }
    }

    #[test]
    fn greed_that_was_never_refused_proves_nothing() {
        let mut greedy = Facts { expects_refusals: true, ..kept() };
        assert_eq!(failures(&[greedy.clone()], recovered()).len(), 1);
        greedy.progress.take(
            r#"{"event":"full","pid":1,"apis":{"plain":{"attempts":2,"refused":1},
                "async":{"attempts":2,"refused":0}}}"#,
        );
        let failures = failures(&[greedy], recovered());
        assert!(failures.len() == 1 && failures[0].contains("async"), "{failures:?}");
    }

    #[test]
    fn a_second_replica_that_gave_nothing_fails() {
        let large = Facts { one_replica: Some(50), ..kept() };
        assert_eq!(failures(&[large], recovered()).len(), 1);
        let large = Facts { one_replica: Some(49), ..kept() };
        assert!(failures(&[large], recovered()).is_empty());
    }

    #[test]
    fn bytes_that_do_not_come_back_fail() {
        assert_eq!(failures(&[kept()], Recovery::default()).len(), 2);
    }

    #[test]
    fn an_unexpected_end_fails() {
        let ended = Facts { exit: Some(2), ..kept() };
        assert_eq!(failures(&[ended], recovered()).len(), 1);
    }
}
