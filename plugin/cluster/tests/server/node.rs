//! The labels of a node, and their watch.

use std::time::Duration;

use tessera_cluster::fixtures::Temper;
use tessera_cluster::node::NodeLabels;
use tessera_cluster::{ApiError, Kind, Verb};

use super::World;

const LABEL: &str = "tessera.dev/config";

fn labels(world: &World, watch: Duration) -> NodeLabels {
    NodeLabels::new(world.server.access(), "n1", Duration::from_secs(3), watch)
}

#[tokio::test]
async fn forgotten_changes_are_read_again_and_what_is_forbidden_is_named() {
    let world = World::new();
    let own = labels(&world, Duration::from_secs(60));
    let old = own.get().await.unwrap();
    world.server.with(|store| store.label("n1", LABEL, Some("l4")));
    // What changed between reading and watching is heard, too.
    own.changed(&old).await.unwrap();
    let watched = world.server.asked().pop().unwrap();
    assert!(watched.target.contains("fieldSelector=metadata.name%3Dn1"), "{watched:?}");
    assert!(watched.headers["accept"].contains("PartialObjectMetadata"), "{watched:?}");
    world.server.forget_changes();
    own.changed(&old).await.unwrap();
    world.server.forbid("WATCH", "nodes", true);
    let forbidden = own.changed(&old).await.unwrap_err();
    assert!(
        matches!(&forbidden, ApiError::Forbidden { call, .. } if (call.verb, call.kind) == (Verb::Watch, Kind::Nodes))
    );
    world.server.set_temper(Temper::Answers(500, "etcd".into()));
    assert!(matches!(own.get().await, Err(ApiError::Busy { status: 500, .. })));
}
