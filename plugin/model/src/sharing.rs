//! What a share means, and how replicas are placed.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{EnumString, IntoStaticStr, VariantArray};

/// What the compute share means. From the loosest to the strictest, which is also their order.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    JsonSchema,
    EnumString,
    IntoStaticStr,
    VariantArray,
)]
#[schemars(rename = "Policy")]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum Compute {
    None,
    /// A weight: any tenant may use idle GPU time.
    #[default]
    Burst,
    /// A cap.
    Strict,
}

impl Compute {
    /// This one and the stricter ones, as a person may write them: `burst or strict`.
    pub fn or_stricter(self) -> &'static str {
        match self {
            Compute::Burst => "burst or strict",
            Compute::Strict => "strict",
            Compute::None => "none, burst or strict",
        }
    }
}

/// Which GPU `GetPreferredAllocation` prefers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum Placement {
    /// The fullest GPU that has room: leaves whole GPUs free.
    Packed,
    /// The emptiest GPU: fewest neighbours.
    Distributed,
}

/// Whether the replicas of a container may, or must, lie on several GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum Split {
    /// All on one GPU; else `Allocate` fails.
    Reject,
    /// On as few GPUs as can be. The container sees all of them.
    Spread,
    /// Each on another GPU; else `Allocate` fails.
    Distinct,
}
