//! Real connections, addresses that are made up.

use tokio::net::TcpListener;

use super::*;

async fn stream() -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    TcpStream::connect(listener.local_addr().unwrap()).await.unwrap()
}

fn limits(most: usize) -> Arc<ConnectionLimits> {
    Arc::new(ConnectionLimits::of(most, 1 << 20))
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[tokio::test]
async fn a_flood_evicts_its_own_connections_and_never_one_that_has_asked() {
    let (limits, stream) = (limits(16), stream().await);
    let admit = |from: &str| {
        let permit = limits.admit(&stream, address(from)).unwrap();
        let evicted = permit.is_silent();
        (permit, evicted)
    };
    let (kubelet, mut kubelet_evicted) = admit("10.0.0.1");
    let (asked, _evicted) = admit("10.9.9.9");
    let mut asked_evicted = asked.speaks().unwrap();
    asked.request_read();
    let mut flood: Vec<_> = (0..100).map(|_| admit("10.9.9.9")).collect();
    // Twelve may be silent: the oldest of the flood have gone, and nobody else.
    let evicted = flood.iter_mut().filter_map(|(_, evicted)| evicted.try_recv().ok()).count();
    assert_eq!(evicted, 100 - 11);
    assert!(flood[88].0.speaks().is_none(), "it was asked to go");
    assert!(kubelet_evicted.try_recv().is_err() && asked_evicted.try_recv().is_err());
    assert!(kubelet.speaks().is_some());
    drop(flood);
    drop((kubelet, asked));
    let state = lock(&limits.state);
    assert_eq!((state.open, state.silent.len(), state.speaking.len()), (0, 0, 0));
}

#[tokio::test]
async fn half_heads_make_room_for_each_other_and_not_for_silence() {
    let (limits, stream) = (limits(16), stream().await);
    let mut permits: Vec<_> = (0..6)
        .map(|_| {
            let permit = limits.admit(&stream, address("10.0.0.2")).unwrap();
            let evicted = permit.speaks().unwrap();
            (permit, evicted)
        })
        .collect();
    let gone: Vec<bool> = permits.iter_mut().map(|(_, e)| e.try_recv().is_ok()).collect();
    assert_eq!(gone, [true, true, true, true, false, false], "two may speak");
}

#[tokio::test]
async fn where_everybody_has_asked_a_newcomer_is_turned_away() {
    let (limits, stream) = (limits(16), stream().await);
    let permits: Vec<_> = (0..16)
        .map(|_| {
            let permit = limits.admit(&stream, address("10.0.0.2")).unwrap();
            let _evicted = permit.speaks().unwrap();
            permit.request_read();
            permit
        })
        .collect();
    assert!(limits.admit(&stream, address("10.0.0.1")).is_none());
    drop(permits);
    assert!(limits.admit(&stream, address("10.0.0.1")).is_some());
}

#[tokio::test]
async fn scrapes_of_one_address_leave_room_for_others() {
    let (limits, stream) = (limits(64), stream().await);
    let permit = |from: &str| Arc::new(limits.admit(&stream, address(from)).unwrap());
    let many: Vec<_> = (0..10).filter_map(|_| permit("10.0.0.2").scrape()).collect();
    assert_eq!(many.len(), SCRAPES_PER_CLIENT);
    // One host, however many addresses of its network it takes.
    let v6: Vec<_> =
        (0..10).filter_map(|n| permit(&format!("fd00:1:2:3::{n:x}")).scrape()).collect();
    assert_eq!(v6.len(), SCRAPES_PER_CLIENT);
    assert!(permit("::ffff:10.0.0.2").scrape().is_none(), "the same address");
    assert!(permit("10.0.0.3").scrape().is_some());
    drop((many, v6));
    // And by time.
    let taken = (0..1000).filter(|_| permit("10.0.0.4").scrape().is_some()).count();
    assert!(taken < 500, "{taken} of a thousand at once");
    assert_eq!(lock(&limits.state).scrapes, 0);
}

#[tokio::test]
async fn addresses_that_come_and_go_are_forgotten() {
    let (limits, stream) = (limits(2048), stream().await);
    let mut held = Vec::new();
    for n in 0..2000u32 {
        let from = format!("10.1.{}.{}", n / 256, n % 256);
        let permit = Arc::new(limits.admit(&stream, address(&from)).unwrap());
        held.push(permit.scrape());
        held.truncate(3);
    }
    assert!(lock(&limits.state).scrapers.len() <= ADDRESSES);
}

#[tokio::test]
async fn nobody_is_let_in_before_those_that_came_first_were_looked_at() {
    let (limits, stream) = (limits(2048), stream().await);
    let mut permits = Vec::new();
    while limits.is_ready() {
        permits.push(limits.admit(&stream, address("10.0.0.2")).unwrap());
    }
    assert_eq!(permits.len(), 96);
    let _evicted = permits[0].is_silent();
    assert!(limits.is_ready());
    permits.push(limits.admit(&stream, address("10.0.0.2")).unwrap());
    assert!(!limits.is_ready());
    assert!(permits[1].speaks().is_some() && limits.is_ready());
    drop(permits);
    assert_eq!(lock(&limits.state).fresh, 0);
}
