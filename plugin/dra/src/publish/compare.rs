//! What was written against what the API server kept.

use tessera_cluster::k8s_openapi::api::resource::v1::{
    Device, DeviceCapacity, ResourceSlice, ResourceSliceSpec,
};
use tessera_cluster::k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use tessera_cluster::k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tessera_cluster::k8s_openapi::jiff::Timestamp;

/// Whether two slices say the same, however they write it.
pub(super) fn same(a: &ResourceSlice, b: &ResourceSlice) -> bool {
    normal(&a.spec) == normal(&b.spec)
}

/// Whether a device can be shared as the driver means it.
pub(super) fn is_shared(device: &Device) -> bool {
    let mut capacities = device.capacity.iter().flat_map(|all| all.values());
    device.allow_multiple_allocations == Some(true)
        && capacities.all(|capacity| capacity.request_policy.is_some())
}

/// A specification in one way of writing: absent for empty, and quantities as numbers.
fn normal(spec: &ResourceSliceSpec) -> ResourceSliceSpec {
    let mut spec = spec.clone();
    for device in spec.devices.iter_mut().flatten() {
        device.allow_multiple_allocations = device.allow_multiple_allocations.filter(|yes| *yes);
        for capacity in device.capacity.iter_mut().flat_map(|all| all.values_mut()) {
            number(capacity);
        }
        for taint in device.taints.iter_mut().flatten() {
            let seconds = taint.time_added.take().map(|Time(added)| added.as_second());
            taint.time_added = seconds.and_then(|s| Timestamp::from_second(s).ok()).map(Time);
        }
        empty(&mut device.attributes, |all| all.is_empty());
        empty(&mut device.capacity, |all| all.is_empty());
        empty(&mut device.taints, Vec::is_empty);
    }
    empty(&mut spec.devices, Vec::is_empty);
    spec.all_nodes = spec.all_nodes.filter(|yes| *yes);
    spec.per_device_node_selection = spec.per_device_node_selection.filter(|yes| *yes);
    spec
}

fn empty<T>(value: &mut Option<T>, is_empty: impl Fn(&T) -> bool) {
    if value.as_ref().is_some_and(is_empty) {
        *value = None;
    }
}

fn number(capacity: &mut DeviceCapacity) {
    let plain = |quantity: &mut Quantity| {
        let parsed = tessera_model::quantity::Quantity::parse(&quantity.0);
        if let Ok(units) = parsed.and_then(tessera_model::quantity::Quantity::units) {
            quantity.0 = units.to_string();
        }
    };
    plain(&mut capacity.value);
    let Some(policy) = &mut capacity.request_policy else { return };
    policy.default.iter_mut().for_each(plain);
    policy.valid_values.iter_mut().flatten().for_each(plain);
    if let Some(range) = &mut policy.valid_range {
        plain(&mut range.min);
        range.max.iter_mut().chain(&mut range.step).for_each(plain);
    }
}

#[cfg(test)]
mod tests {
    use super::super::pool::{Node, slice};
    use super::super::{Offer, Published, taints};
    use super::*;
    use crate::fixtures::gpu;
    use tessera_config::Config;

    fn sent() -> ResourceSlice {
        let node = Node { name: "n1".to_owned(), uid: "u".to_owned() };
        let cordoned = Published { is_cordoned: true, ..gpu("GPU-a", 0) };
        let offer = Offer::new(&[cordoned, gpu("GPU-b", 1)], &Config::default());
        assert!(offer.devices.iter().all(is_shared));
        assert_eq!(offer.devices[0].taints.as_ref().unwrap()[0].key, taints::CORDONED);
        slice(&node, &offer.devices, 0, 1, 1)
    }

    fn kept(change: impl Fn(&mut Device)) -> ResourceSlice {
        let mut kept = sent();
        kept.spec.devices.iter_mut().flatten().for_each(change);
        kept
    }

    #[test]
    fn another_way_of_writing_is_no_difference() {
        let kept = kept(|device| {
            let memory = device.capacity.as_mut().unwrap().get_mut("memory").unwrap();
            memory.value.0 = (81_408u64 << 20).to_string();
            device.taints.get_or_insert_default();
            device.consumes_counters = None;
        });
        assert!(same(&sent(), &kept));
    }

    #[test]
    fn what_is_dropped_is_a_difference() {
        let whole = kept(|device| device.allow_multiple_allocations = Some(false));
        let free = kept(|device| {
            let capacity = device.capacity.as_mut().unwrap();
            capacity.values_mut().for_each(|capacity| capacity.request_policy = None);
        });
        for kept in [&whole, &free] {
            assert!(!kept.spec.devices.iter().flatten().any(is_shared));
        }
        let mut fewer = sent();
        fewer.spec.devices.as_mut().unwrap().pop();
        let bare = kept(|device| device.attributes = None);
        for kept in [whole, free, fewer, bare, kept(|device| device.taints = None)] {
            assert!(!same(&sent(), &kept));
        }
    }
}
