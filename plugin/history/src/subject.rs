//! What a series is of, and what a subject names, as `tessera explain` takes it.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use tessera_model::written_name;
use tessera_view::gpu::Gpu;

use super::query::QueryError;

/// A tenant on one GPU, or a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Key {
    /// The allocation; empty for a GPU's own.
    pub id: String,
    /// Which Allocate of this id; 0 for a GPU's own.
    pub generation: u64,
    pub gpu_uuid: String,
}

/// A series and its names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Series {
    pub key: Key,
    /// The pod's namespace; empty where kubelet never named it.
    pub namespace: String,
    pub pod: String,
    pub container: String,
}

impl Series {
    /// It is a GPU's own.
    pub fn is_gpu(&self) -> bool {
        self.key.id.is_empty()
    }
}

/// What is asked about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    /// Everything.
    All,
    /// A GPU, by its UUID.
    Gpu(String),
    /// Tenants, by id and generation.
    Tenants(BTreeSet<(String, u64)>),
}

/// Pods first, then claims' ids, containers, ids, GPUs.
pub(crate) fn find(
    subject: &str,
    namespace: &str,
    names: &BTreeMap<Key, Series>,
    gpus: &[Gpu],
) -> Result<Subject, QueryError> {
    let subject = subject.trim();
    if subject.is_empty() {
        return Ok(Subject::All);
    }
    let in_namespace = |series: &&Series| namespace.is_empty() || series.namespace == namespace;
    let tenants: Vec<&Series> =
        names.values().filter(|series| !series.is_gpu()).filter(in_namespace).collect();
    let held = |test: &dyn Fn(&Series) -> bool| -> BTreeSet<(String, u64)> {
        let held = tenants.iter().filter(|series| test(series));
        held.map(|series| (series.key.id.clone(), series.key.generation)).collect()
    };
    let parts: Vec<&str> = subject.split('/').collect();
    let mut found = match parts.as_slice() {
        [pod] => held(&|series| series.pod == *pod),
        [namespace, pod] => held(&|series| series.namespace == *namespace && series.pod == *pod),
        [namespace, pod, container] => held(&|series| {
            series.namespace == *namespace && series.pod == *pod && series.container == *container
        }),
        _ => BTreeSet::new(),
    };
    if found.is_empty() {
        found = held(&|series| series.container == subject);
    }
    if found.is_empty() {
        let ids: BTreeSet<&str> = tenants.iter().map(|series| series.key.id.as_str()).collect();
        if let Some(id) = beginning(&ids, subject)? {
            found = held(&|series| series.key.id == id);
        }
    }
    if !found.is_empty() {
        return Ok(Subject::Tenants(found));
    }
    if let Some(gpu) = gpus.iter().find(|gpu| gpu.index.to_string() == subject) {
        return Ok(Subject::Gpu(gpu.uuid.clone()));
    }
    let gone = names.values().filter(|series| series.is_gpu()).map(|series| &series.key.gpu_uuid);
    let uuids: BTreeSet<&str> =
        gpus.iter().map(|gpu| &gpu.uuid).chain(gone).map(String::as_str).collect();
    match beginning(&uuids, subject)? {
        Some(uuid) => Ok(Subject::Gpu(uuid.to_owned())),
        None => Err(nothing(subject, &tenants, &uuids)),
    }
}

fn beginning<'a>(ids: &BTreeSet<&'a str>, subject: &str) -> Result<Option<&'a str>, QueryError> {
    written_name::by_beginning(ids, subject)
        .map_err(|several| QueryError::NotFound(several.to_string()))
}

fn nothing(subject: &str, tenants: &[&Series], uuids: &BTreeSet<&str>) -> QueryError {
    let pods = tenants.iter().filter(|series| !series.pod.is_empty());
    let pods = pods.map(|series| format!("{}/{}", series.namespace, series.pod));
    let all = pods.chain(uuids.iter().map(ToString::to_string)).collect();
    let there_is = written_name::there_is(&written_name::proposals(all, subject));
    QueryError::NotFound(format!(
        "nothing is called \"{subject}\": no pod, container, allocation or GPU of this node, now or in its \
         history{there_is}"
    ))
}
