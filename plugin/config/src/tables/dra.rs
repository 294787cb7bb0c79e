//! `[dra]`: GPUs that are sold by Dynamic Resource Allocation; `docs/dra.md` has the reasons.

use crate::form::{boolean, list, whole_mib, word};
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
        memory_step_bytes as "memory_step": u64 = 64 * MIB, whole_mib(MIB, NO_STEP);
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
