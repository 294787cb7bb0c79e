//! What a share means, and how replicas are placed.

/// What the compute share means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compute {
    /// A weight: any tenant may use idle GPU time.
    Burst,
    /// A cap.
    Strict,
    /// Compute is not limited.
    None,
}

impl Compute {
    /// As the configuration has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Compute::Burst => "burst",
            Compute::Strict => "strict",
            Compute::None => "none",
        }
    }
}

/// Which GPU `GetPreferredAllocation` prefers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The fullest GPU that has room: leaves whole GPUs free.
    Packed,
    /// The emptiest GPU: fewest neighbours.
    Distributed,
}

/// Whether the replicas of a container may, or must, lie on several GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// All on one GPU; else `Allocate` fails.
    Reject,
    /// On as few GPUs as can be. The container sees all of them.
    Spread,
    /// Each on another GPU; else `Allocate` fails.
    Distinct,
}
