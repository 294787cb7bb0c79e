//! What a verdict is made of, read with the user's own rights. What may not be read is said, not guessed.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use tessera_cluster::ApiError;
use tessera_cluster::user::objects::{Node, Pod};
use tessera_view::fleet;

use super::Known;
use super::claims::{self, Claim, Classes};
use crate::fleet::{Fleet, FleetError};

/// See the module's text.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    pub pod: Pod,
    /// The nodes that are asked about; empty for all.
    pub only: BTreeSet<String>,
    pub nodes: Known<Vec<Node>>,
    /// All pods of the cluster.
    pub pods: Known<Vec<Pod>>,
    /// The pod's claims.
    pub claims: Vec<Claim>,
    /// The device classes that they name.
    pub classes: Classes,
    /// Resources that claims serve where no device plugin offers them.
    pub extended: Known<BTreeSet<String>>,
    /// What the plugins say.
    pub fleet: fleet::Fleet,
    /// Why no plugin could be asked at all.
    pub fleet_error: Option<String>,
}

/// Reads all that concerns a pod. `None` where there is no such pod.
///
/// # Errors
/// The pod itself cannot be read.
pub async fn facts(
    fleet: &Fleet,
    namespace: &str,
    name: &str,
) -> Result<Option<Facts>, FleetError> {
    let user = fleet.user();
    let pod = user.pod(namespace, name).await;
    let Some(pod) = pod? else {
        return Ok(None);
    };
    let (gathered, nodes, pods, all_classes) =
        tokio::join!(fleet.gather(), user.nodes(), user.pods("", ""), user.device_classes());
    let only = fleet.options().nodes.clone();
    let (fleet, fleet_error) = match gathered {
        Ok(fleet) => (fleet, None),
        Err(error) => (fleet.known(), Some(error.to_string())),
    };
    let mut claims = Vec::new();
    let mut classes: Classes = BTreeMap::new();
    for claim in &pod.spec.resource_claims {
        let made = pod.status.resource_claim_statuses.iter().find(|one| one.name == claim.name);
        let made = made.and_then(|status| status.resource_claim_name.clone());
        let object_name = claim.resource_claim_name.clone().or(made);
        let object = match &object_name {
            Some(name) => user.claim(namespace, name).await.map_err(words),
            None => Ok(None),
        };
        if let Ok(Some(object)) = &object {
            for way in claims::requests(object).into_iter().flatten() {
                if let Entry::Vacant(unknown) = classes.entry(way.class) {
                    let class = user.device_class(unknown.key()).await.map_err(words);
                    unknown.insert(class);
                }
            }
        }
        claims.push(Claim { name: claim.name.clone(), object_name, object });
    }
    Ok(Some(Facts {
        pod,
        only,
        extended: all_classes.map(|all| claims::extended(&all)).map_err(words),
        nodes: nodes.map_err(words),
        pods: pods.map_err(words),
        claims,
        classes,
        fleet,
        fleet_error,
    }))
}

fn words(error: ApiError) -> String {
    match error {
        ApiError::Forbidden { call, .. } => format!("you may not {call}"),
        error => error.to_string(),
    }
}
