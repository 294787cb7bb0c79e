//! How the scheduler of Kubernetes counts requests, for tests.

use tessera_cluster::k8s_openapi::api::resource::v1::DeviceCapacity;
use tessera_cluster::k8s_openapi::apimachinery::pkg::api::resource::Quantity;

pub(crate) fn units(quantity: &Quantity) -> u64 {
    tessera_model::quantity::Quantity::parse(&quantity.0).unwrap().units().unwrap()
}

/// What is counted for a request of so much; `None` where the device does not suit.
pub(crate) fn consumed(capacity: &DeviceCapacity, asked: Option<u64>) -> Option<u64> {
    let value = units(&capacity.value);
    let policy = capacity.request_policy.as_ref().expect("a device that is shared");
    let Some(asked) = asked else {
        return policy.default.as_ref().map(units);
    };
    let rounded = match (&policy.valid_range, &policy.valid_values) {
        (Some(range), None) => {
            let (min, step) = (units(&range.min), range.step.as_ref().map_or(1, units));
            let above = asked.saturating_sub(min);
            let rounded = min + above.div_ceil(step) * step;
            Some(rounded).filter(|bytes| range.max.as_ref().is_none_or(|max| *bytes <= units(max)))
        }
        (None, Some(values)) => values.iter().map(units).find(|value| asked <= *value),
        other => panic!("not one of range and values: {other:?}"),
    };
    rounded.filter(|bytes| *bytes <= value)
}
