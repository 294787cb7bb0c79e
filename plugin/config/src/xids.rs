//! The meaning of each XID, unless the configuration says otherwise.
//!
//! From NVIDIA's "Xid Errors" (docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors with the Xid
//! Catalog"): its column *Resolution Bucket (Immediate Action)* says `IGNORE`, `RESTART_APP`,
//! `RESET_GPU` or more. What restarts an application and no more hurts that application alone; one of
//! those that may also announce a fault of the hardware is a suspicion, as is whatever is not listed.

use crate::words::words;
use XidAction::{Ignore, Suspect, Unhealthy, UntilReset};

words! {
    /// What an XID means for the GPU that reports it.
    XidAction {
        /// Nothing: a program's own fault.
        Ignore = "ignore",
        /// One is a warning, several within a time are not.
        Suspect = "suspect",
        /// Out of service until it has been quiet.
        Unhealthy = "unhealthy",
        /// Out of service until the driver shows that it was reset.
        UntilReset = "until-reset",
    }
}

/// Number, meaning, reason; by number.
pub const XIDS: &[(u32, XidAction, &str)] = &[
    (13, Ignore, "graphics engine exception: a program's own fault (RESTART_APP)"),
    (31, Ignore, "page fault of a program (RESTART_APP)"),
    (43, Ignore, "a program's channel was reset (IGNORE)"),
    (45, Ignore, "channels removed after a program's end or another XID"),
    (46, UntilReset, "the GPU stopped processing (RESET_GPU)"),
    (48, UntilReset, "uncorrectable ECC error: reset, unless the driver contained it"),
    (61, UntilReset, "microcontroller breakpoint: older GPUs need a reset"),
    (62, UntilReset, "microcontroller halt (RESET_GPU)"),
    (63, Ignore, "a row was remapped: takes effect at the next reset, the GPU is usable (IGNORE)"),
    (64, UntilReset, "a row could not be remapped (RESET_GPU)"),
    (68, Ignore, "video decoder exception: a program's own fault (RESTART_APP)"),
    (74, UntilReset, "NVLink error: links stay down until a reset"),
    (79, UntilReset, "fallen off the bus (RESTART_BM)"),
    (92, Ignore, "many corrected single-bit errors (IGNORE)"),
    (94, Suspect, "contained ECC error: one program suffered; several of them are bad memory"),
    (95, UntilReset, "uncontained ECC error: any program may have suffered (RESET_GPU)"),
    (
        109,
        Ignore,
        "context switch timeout: mostly a program's own; where it takes a reset, the \
                   driver's recovery action says so",
    ),
    (110, UntilReset, "security fault (RESET_GPU)"),
    (119, UntilReset, "GSP does not answer (RESET_GPU)"),
    (120, UntilReset, "GSP error (RESET_GPU)"),
    (136, UntilReset, "NVLink training failed (RESET_GPU)"),
    (140, UntilReset, "unrecovered ECC error (RESET_GPU)"),
    (143, UntilReset, "GPU initialisation failed (RESET_GPU)"),
    (144, Unhealthy, "NVLink 5 (SAW): the driver's recovery action says if it takes a reset"),
    (145, Unhealthy, "NVLink 5 (RLW): as 144"),
    (146, Unhealthy, "NVLink 5 (TLW): as 144"),
    (147, Unhealthy, "NVLink 5 (TREX): as 144"),
    (148, Unhealthy, "NVLink 5 (NVLPW): as 144"),
    (149, Unhealthy, "NVLink 5 (NETIR): as 144"),
    (150, Unhealthy, "NVLink 5 (MSE): as 144"),
    (151, UntilReset, "key rotation failed (RESTART_VM)"),
    (154, Ignore, "the recovery action changed: it is asked of NVML at once"),
    (155, UntilReset, "NVLink, by software (RESET_GPU)"),
    (156, UntilReset, "a resource was retired (RESET_GPU)"),
    (158, UntilReset, "fatal timeout (RESET_GPU)"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::form::Words;

    #[test]
    fn the_documentation_has_the_table() {
        let text = include_str!("../../../docs/health.md");
        for (xid, action, reason) in XIDS {
            let (word, _) =
                <XidAction as Words>::WORDS.iter().find(|(_, known)| known == action).unwrap();
            let row = format!("| {xid} | {word} | {reason} |");
            assert!(text.contains(&row), "docs/health.md lacks: {row}");
        }
    }

    #[test]
    fn the_table_is_in_order_and_names_each_once() {
        assert!(XIDS.windows(2).all(|pair| pair[0].0 < pair[1].0));
    }
}
