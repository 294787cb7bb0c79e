//! The watch of the driver's own slices.

use std::time::{Duration, Instant};

use tessera_cluster::ApiError;
use tessera_cluster::fixtures::Temper;
use tessera_cluster::resource::{SliceEvent, Timing};
use tokio::sync::mpsc::Receiver;
use tokio::time::timeout;

use super::{DRIVER, World, slice, slice_of, timing, until};

async fn next(watch: &mut Receiver<SliceEvent>) -> SliceEvent {
    timeout(Duration::from_secs(60), watch.recv()).await.expect("in time").expect("it goes on")
}

async fn silent(watch: &mut Receiver<SliceEvent>) {
    let event = timeout(Duration::from_millis(100), watch.recv()).await;
    assert!(event.is_err(), "{event:?}");
}

#[tokio::test]
async fn own_slices_are_followed_and_others_are_not() {
    let world = World::new();
    let made = world.client.create_slice(&slice()).await.unwrap();
    let name = made.metadata.name.clone().unwrap();
    let mut watch = world.client.watch_own_slices();
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
    // What there is already is said, too.
    let changed = |made: &tessera_cluster::k8s_openapi::api::resource::v1::ResourceSlice| {
        let resource_version = made.metadata.resource_version.clone().unwrap();
        SliceEvent::Changed { name: made.metadata.name.clone().unwrap(), resource_version }
    };
    assert_eq!(next(&mut watch).await, changed(&made));
    let newer = world.client.update_slice(&made).await.unwrap();
    assert_eq!(next(&mut watch).await, changed(&newer));
    world.server.with(|store| {
        store.create_slice(slice_of("nic", "n1")).unwrap();
        store.create_slice(slice_of(DRIVER, "n2")).unwrap();
    });
    silent(&mut watch).await;
    // Kubelet starts: all drivers' slices of the node go.
    assert_eq!(world.server.with(|store| store.wipe_slices("n1")), 2);
    assert_eq!(next(&mut watch).await, SliceEvent::Removed { name });
    silent(&mut watch).await;
    let asked = world.server.asked();
    let watched = asked.iter().find(|asked| asked.target.contains("watch=true")).unwrap();
    assert!(watched.headers["accept"].contains("PartialObjectMetadata"), "{watched:?}");
}

#[tokio::test]
async fn a_watch_whose_time_is_over_goes_on_where_it_was() {
    let world = World::new();
    let mut watch = world.client.watch_own_slices();
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
    world.client.create_slice(&slice()).await.unwrap();
    assert!(matches!(next(&mut watch).await, SliceEvent::Changed { .. }));
    world.server.end_watches();
    let name = world.client.create_slice(&slice()).await.unwrap().metadata.name.unwrap();
    let event = next(&mut watch).await;
    assert!(
        matches!(&event, SliceEvent::Changed { name: changed, .. } if *changed == name),
        "{event:?}"
    );
    silent(&mut watch).await;
}

#[tokio::test]
async fn a_gap_that_the_server_does_not_remember_begins_the_watch_again() {
    let world = World::new();
    let mut watch = world.client.watch_own_slices();
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
    world.client.create_slice(&slice()).await.unwrap();
    assert!(matches!(next(&mut watch).await, SliceEvent::Changed { .. }));
    world.server.with(|store| store.wipe_slices("n1"));
    next(&mut watch).await;
    world.server.with(|store| store.create_slice(slice_of("nic", "n1")).unwrap());
    world.server.forget_changes();
    world.server.end_watches();
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
    silent(&mut watch).await;
}

#[tokio::test]
async fn a_server_that_fails_is_said_once_and_asked_with_growing_pauses() {
    let world = World::new();
    let mut watch = world.client.watch_own_slices();
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
    world.server.set_temper(Temper::Answers(500, "etcd".into()));
    let event = next(&mut watch).await;
    assert!(matches!(event, SliceEvent::Failed(ApiError::Busy { .. })), "{event:?}");
    let (begun, before) = (Instant::now(), world.server.asked().len());
    until(|| world.server.asked().len() >= before + 6).await;
    // 10, 20 and 40 ms, then 80 each.
    let asked = world.server.asked().len() - before;
    let most = 4 + begun.elapsed().as_millis() / 80;
    assert!(asked as u128 <= most, "{asked} requests in {:?}", begun.elapsed());
    silent(&mut watch).await;
    world.server.set_temper(Temper::Works);
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
}

#[tokio::test]
async fn a_watch_that_is_forbidden_says_so_and_begins_when_it_is_granted() {
    let world = World::new();
    world.server.forbid("WATCH", "resourceslices", true);
    let mut watch = world.client.watch_own_slices();
    let event = next(&mut watch).await;
    let SliceEvent::Failed(error) = event else { panic!("{event:?}") };
    assert!(
        error.to_string().contains("resources: [\"resourceslices\"], verbs: [\"watch\"]"),
        "{error}"
    );
    world.server.forbid("WATCH", "resourceslices", false);
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
}

#[tokio::test]
async fn a_connection_that_is_silent_for_too_long_is_made_again() {
    let world = World::with(Timing { silence: Duration::from_millis(100), ..timing() });
    let mut watch = world.client.watch_own_slices();
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
    let event = next(&mut watch).await;
    assert!(matches!(event, SliceEvent::Failed(ApiError::Slow { .. })), "{event:?}");
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
}

#[tokio::test]
async fn a_watch_goes_on_from_the_last_bookmark() {
    let world = World::new();
    world.server.set_bookmarks(Duration::from_millis(10));
    let mut watch = world.client.watch_own_slices();
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
    // Nothing of its own happens: only a bookmark has the new version.
    let version = world.server.with(|store| {
        store.create_slice(slice_of("nic", "n1")).unwrap();
        store.version()
    });
    let from_there = format!("resourceVersion={version}");
    let mut looked = 0;
    until(|| {
        looked += 1;
        // A watch that is ended at once has had no bookmark, and the next one neither.
        if looked % 20 == 0 {
            world.server.end_watches();
        }
        let asked = world.server.asked();
        asked.last().is_some_and(|asked| asked.target.contains(&from_there))
    })
    .await;
}

#[tokio::test]
async fn a_watch_is_renewed_when_the_time_that_it_asked_for_is_over() {
    let world = World::with(Timing { watch: Duration::from_secs(1), ..timing() });
    let mut watch = world.client.watch_own_slices();
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
    world.client.create_slice(&slice()).await.unwrap();
    assert!(matches!(next(&mut watch).await, SliceEvent::Changed { .. }));
    let renewed = "GET /apis/resource.k8s.io/v1/resourceslices?&watch=true";
    until(|| world.server.count(renewed) > 1).await;
    assert!(watch.try_recv().is_err(), "nothing was missed, so nothing is listed");
}

#[tokio::test]
async fn it_ends_with_its_listener_and_takes_the_connection_along() {
    let world = World::new();
    let mut watch = world.client.watch_own_slices();
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
    assert!(world.server.open() > 0);
    drop(watch);
    until(|| world.server.with(|store| store.open_watches()) == 0).await;
}
