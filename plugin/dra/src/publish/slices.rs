//! Devices cut into the slices of the node's one pool, and which write comes next: the desired slices against those that
//! are there. Pure, and without memory.
//!
//! **Order**: what is obsolete is deleted, what is there is updated, what is missing is made. A pool whose slices
//! change in more than one write gets a new generation: the scheduler takes nothing from a pool of which it has
//! seen a part only.

use tessera_cluster::k8s_openapi::api::resource::v1::{
    Device, ResourcePool, ResourceSlice, ResourceSliceSpec,
};
use tessera_cluster::k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use super::controller::Step;
use crate::names::DRIVER;

/// Most devices of a slice in which one may have a taint.
pub const MOST: usize = 64;
/// Longest name from which the API server makes another, less a dash.
const LONGEST: usize = 57;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its name, which is the pool's too.
    pub name: String,
    /// Its UID: slices go with it.
    pub uid: String,
}

/// Devices by slice, in order; one slice without any where there are none, which says that the driver is up.
pub fn cut(devices: &[Device]) -> Vec<&[Device]> {
    match devices {
        [] => vec![devices],
        _ => devices.chunks(MOST).collect(),
    }
}

/// The slice of a pool of `count` slices that has these devices. Its name begins with its index, so that the
/// scheduler, which goes by name, keeps the order of devices.
pub fn slice(
    node: &Node,
    devices: &[Device],
    index: usize,
    count: usize,
    generation: i64,
) -> ResourceSlice {
    let mut base = format!("{DRIVER}-{index:03}-{}", node.name);
    base.truncate(LONGEST);
    let base = base.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
    ResourceSlice {
        metadata: ObjectMeta {
            generate_name: Some(format!("{base}-")),
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".to_owned(),
                kind: "Node".to_owned(),
                name: node.name.clone(),
                uid: node.uid.clone(),
                controller: Some(true),
                block_owner_deletion: None,
            }]),
            ..ObjectMeta::default()
        },
        spec: ResourceSliceSpec {
            driver: DRIVER.to_owned(),
            node_name: Some(node.name.clone()),
            pool: ResourcePool {
                name: node.name.clone(),
                generation,
                resource_slice_count: i64::try_from(count).unwrap_or(i64::MAX),
            },
            devices: Some(devices.to_vec()).filter(|devices| !devices.is_empty()),
            ..ResourceSliceSpec::default()
        },
    }
}

/// Which slice of its pool this is, by its name; `None` for one that is not of the pool.
pub fn index(slice: &ResourceSlice) -> Option<usize> {
    let name = slice.metadata.name.as_deref()?;
    let rest = name.strip_prefix(DRIVER)?.strip_prefix('-')?;
    let (index, _) = rest.split_once('-')?;
    index.parse().ok()
}

/// Whether the slice belongs to the node as it is now.
pub fn is_of(slice: &ResourceSlice, node: &Node) -> bool {
    let owners = slice.metadata.owner_references.iter().flatten();
    let mut owned = owners.filter(|owner| owner.kind == "Node" && owner.uid == node.uid);
    slice.spec.driver == DRIVER && slice.spec.pool.name == node.name && owned.next().is_some()
}

/// What is there, by its place in the pool.
pub(super) struct Standing<'a> {
    /// As many as are desired.
    places: Vec<Option<&'a ResourceSlice>>,
    obsolete: Vec<&'a str>,
    generation: i64,
}

impl<'a> Standing<'a> {
    pub(super) fn of(
        observed: impl IntoIterator<Item = &'a ResourceSlice>,
        node: &Node,
        count: usize,
    ) -> Self {
        let mut standing =
            Standing { places: vec![None; count], obsolete: Vec::new(), generation: 0 };
        for slice in observed {
            let place = index(slice).filter(|_| is_of(slice, node));
            let gone = match place.and_then(|index| standing.places.get_mut(index)) {
                None => Some(slice),
                Some(place) => match place {
                    Some(other) if rank(other) >= rank(slice) => Some(slice),
                    _ => place.replace(slice),
                },
            };
            standing.obsolete.extend(gone.and_then(|slice| slice.metadata.name.as_deref()));
        }
        let generations = standing.places.iter().flatten().map(|slice| slice.spec.pool.generation);
        standing.generation = generations.max().unwrap_or(0);
        standing
    }

    /// The highest generation; 0 where there is no slice of the pool.
    pub(super) fn generation(&self) -> i64 {
        self.generation
    }

    /// The generation under which `devices` are published: that of the slices which are there, if it takes one
    /// write at most, or the next.
    pub(super) fn next_generation(
        &self,
        node: &Node,
        devices: &[Device],
        is_in_sync: &dyn Fn(&ResourceSlice, &ResourceSlice) -> bool,
    ) -> i64 {
        let lacking = self.lacking(node, devices, self.generation, is_in_sync).count();
        match self.generation >= 1 && lacking <= 1 {
            true => self.generation,
            false => self.generation + 1,
        }
    }

    pub(super) fn write(
        &self,
        node: &Node,
        devices: &[Device],
        generation: i64,
        is_in_sync: &dyn Fn(&ResourceSlice, &ResourceSlice) -> bool,
    ) -> Option<Step> {
        if let Some(name) = self.obsolete.first() {
            return Some(Step::Delete((*name).to_owned()));
        }
        let update = |(there, wanted): (Option<&ResourceSlice>, ResourceSlice)| {
            let mut slice = wanted;
            let there = there?;
            slice.metadata.generate_name = None;
            slice.metadata.name.clone_from(&there.metadata.name);
            slice.metadata.resource_version.clone_from(&there.metadata.resource_version);
            Some(Step::Update(Box::new(slice)))
        };
        let mut updates = self.lacking(node, devices, generation, is_in_sync).filter_map(update);
        updates.next().or_else(|| {
            let mut lacking = self.lacking(node, devices, generation, is_in_sync);
            lacking.next().map(|(_, wanted)| Step::Create(Box::new(wanted)))
        })
    }

    fn lacking<'s>(
        &'s self,
        node: &'s Node,
        devices: &'s [Device],
        generation: i64,
        is_in_sync: &'s dyn Fn(&ResourceSlice, &ResourceSlice) -> bool,
    ) -> impl Iterator<Item = (Option<&'a ResourceSlice>, ResourceSlice)> + 's {
        let parts = cut(devices);
        let count = parts.len();
        let wanted = parts.into_iter().enumerate();
        wanted.zip(&self.places).filter_map(move |((index, part), there)| {
            let wanted = slice(node, part, index, count, generation);
            let right = there.is_some_and(|there| is_in_sync(there, &wanted));
            (!right).then_some((*there, wanted))
        })
    }
}

/// Of two slices at one place the one with the higher rank stays.
fn rank(slice: &ResourceSlice) -> (i64, std::cmp::Reverse<&str>) {
    let name = slice.metadata.name.as_deref().unwrap_or_default();
    (slice.spec.pool.generation, std::cmp::Reverse(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sort_by_index_whatever_the_node_is_called() {
        for name in ["n1", &format!("ip-10-0-0-1.{}.internal", "long.".repeat(12)), &"a".repeat(63)]
        {
            let node = Node { name: (*name).to_owned(), uid: "u".to_owned() };
            let name = |index| {
                let mut slice = slice(&node, &[], index, 20, 1);
                let generate = slice.metadata.generate_name.clone().unwrap();
                assert!(generate.len() <= 58 && generate.ends_with('-'), "{generate}");
                assert!(!generate.contains(".-"), "{generate}");
                slice.metadata.name = Some(format!("{generate}x7k2p"));
                assert_eq!(super::index(&slice), Some(index));
                slice.metadata.name.unwrap()
            };
            let names: Vec<String> = (0..20).map(name).collect();
            assert!(names.is_sorted(), "{names:?}");
        }
    }
}
