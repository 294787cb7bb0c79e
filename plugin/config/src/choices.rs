//! The words of keys that know a few.

use super::{DeviceListStrategy, Events, GpuNames, LogFormat, SoldByOthers, TmpfsPolicy};
use tessera_model::sharing::{Compute, Placement, Split};

pub(super) const COMPUTE: [(&str, Compute); 3] =
    [("burst", Compute::Burst), ("strict", Compute::Strict), ("none", Compute::None)];
pub(super) const PLACEMENT: [(&str, Placement); 2] =
    [("packed", Placement::Packed), ("distributed", Placement::Distributed)];
pub(super) const SPLIT: [(&str, Split); 2] = [("reject", Split::Reject), ("spread", Split::Spread)];
pub(super) const SOLD_BY_OTHERS: [(&str, SoldByOthers); 3] = [
    ("refuse", SoldByOthers::Refuse),
    ("warn", SoldByOthers::Warn),
    ("allow", SoldByOthers::Allow),
];
pub(super) const STRATEGY: [(&str, DeviceListStrategy); 6] = [
    ("envvar", DeviceListStrategy::Envvar),
    ("volume-mounts", DeviceListStrategy::VolumeMounts),
    ("cdi-annotations", DeviceListStrategy::CdiAnnotations),
    ("cdi-cri", DeviceListStrategy::CdiCri),
    ("device-nodes", DeviceListStrategy::DeviceNodes),
    ("none", DeviceListStrategy::None),
];
pub(super) const GPU_NAMES: [(&str, GpuNames); 2] =
    [("uuid", GpuNames::Uuid), ("index", GpuNames::Index)];
pub(super) const TMPFS: [(&str, TmpfsPolicy); 3] =
    [("require", TmpfsPolicy::Require), ("prefer", TmpfsPolicy::Prefer), ("off", TmpfsPolicy::Off)];
pub(super) const EVENTS: [(&str, Events); 2] = [("auto", Events::Auto), ("off", Events::Off)];
pub(super) const FORMAT: [(&str, LogFormat); 2] =
    [("text", LogFormat::Text), ("json", LogFormat::Json)];
