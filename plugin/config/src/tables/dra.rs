//! `[dra]`: GPUs that are sold by Dynamic Resource Allocation; `docs/dra.md` has the reasons.

use crate::form::{boolean, bytes, list, word};
use crate::name;
use crate::parse::Checks;
use crate::table::table;
use crate::{Config, MIB, NoExecute};
use tessera_model::quantity::format_compared;

/// What is wrong with a step of 0.
const NO_STEP: &str = "must be at least 1Mi; 64Mi is the default";

table! {
    /// Dynamic Resource Allocation: pods claim a part of a GPU of any size. See [dra.md](dra.md).
    pub struct Dra {
        /// Whether this node has a DRA driver, `gpu.tessera.dev`, beside the device plugin.
        enabled: bool = false, boolean(), Restart;
        /// GPUs that the DRA driver sells and the device plugin does not. No layout may name one of them. One
        /// that moves is withdrawn at once, and sold by the other when its last container has ended.
        gpus: Vec<String> = vec!["*".into()], list(name::gpu(), "list, as `gpus.include`");
        /// Memory is claimed in multiples of this, rounded up. Not more than one replica's share of a GPU.
        memory_step_bytes as "memory_step": u64 = 64 * MIB, bytes(MIB, NO_STEP).in_whole_mib();
        /// What makes Kubernetes evict pods from a GPU. Else a GPU that is not sold gets no new pods, and those
        /// that it has go on.
        no_execute: Vec<NoExecute> = Vec::new(), list(word(), "list of `unhealthy`, `cordoned`");
    }
}

/// What must hold between the step and a replica whose memory is written in bytes.
pub(crate) fn check_step(config: &Config, checks: &mut Checks<'_>) {
    let step = config.dra.memory_step_bytes;
    let Some(share) = config.share.memory_bytes.filter(|share| *share < step) else { return };
    if config.dra.enabled && checks.are_sound(&["dra.memory_step", "share.memory"]) {
        let [step, share] = format_compared(step, share);
        let message = format!(
            "{step} is more than share.memory ({share}); lower the step, or raise the share"
        );
        checks.problem("dra.memory_step", &message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_counts_and_the_rest_stays() {
        let text = "[dra]\nenabled = true\nno_execute = [\"cordoned\"]\nmemory_step = \"256Mi\"";
        let config = Config::parse(text).unwrap();
        let want = Dra {
            enabled: true,
            no_execute: vec![NoExecute::Cordoned],
            memory_step_bytes: 256 * MIB,
            ..Dra::default()
        };
        assert_eq!(config.dra, want);
        assert!(!Config::default().dra.enabled);
    }

    #[test]
    fn each_mistake_says_what_is_wrong() {
        for (text, part) in [
            ("[dra]\nenabled = \"yes\"", "dra.enabled: must be true or false"),
            ("[dra]\ngpus = [\"\"]", "dra.gpus: entry 1: an empty name matches no GPU"),
            ("[dra]\ngpus = \"0\"", "dra.gpus: must be an array"),
            ("[dra]\nmemory_step = 0", "dra.memory_step: must be at least 1Mi"),
            ("[dra]\nmemory_step = \"100M\"", "is not a whole number of MiB; use 96Mi"),
            ("[dra]\nmemory_step = \"1536Ki\"", "is not a whole number of MiB; use 2Mi"),
            ("[dra]\nno_execute = [\"sick\"]", "\"sick\" is none of \"unhealthy\", \"cordoned\""),
            ("[dra]\nmemery_step = 1", "did you mean `memory_step`?"),
            (
                "[dra]\nenabled = true\nmemory_step = \"8Gi\"\n[share]\nmemory = \"4Gi\"",
                "dra.memory_step: 8 GiB is more than share.memory (4 GiB)",
            ),
        ] {
            let error = Config::parse(text).unwrap_err();
            let found: Vec<String> =
                error.problems.iter().map(|p| format!("{}: {}", p.key, p.message)).collect();
            assert_eq!(found.len(), 1, "{text}: {found:?}");
            assert!(found[0].contains(part), "{text}: {found:?}");
        }
        // Off: the step divides nothing.
        Config::parse("[dra]\nmemory_step = \"8Gi\"\n[share]\nmemory = \"4Gi\"").unwrap();
    }
}
