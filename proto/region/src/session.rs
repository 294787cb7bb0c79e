//! The session's messages: 64 bytes each, one per `SOCK_SEQPACKET` packet.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 2 | magic, `"TS"` |
//! | 2 | 2 | ABI version |
//! | 4 | 4 | message |
//! | 8 | 56 | payload, per message; bytes it does not use are zero |
//!
//! Integers are little-endian. Both ends believe nothing: they drop a packet of another length, an
//! unknown message, a value out of range, and a byte that should be zero and is not.

use crate::abi;
use crate::layout::{ABI_VERSION, MAX_GPUS, SLOTS};

/// Bytes of a message.
pub const MESSAGE_BYTES: usize = 64;
/// Bytes of the UUID in an event.
pub const EVENT_UUID_LEN: usize = 40;

const MAGIC: [u8; 2] = *b"TS";
#[allow(clippy::cast_possible_truncation, reason = "checked by the assertion below")]
const _: () = assert!(ABI_VERSION <= 0xffff);

/// What passes between a tenant's process and the plugin. `gpu` is an index in the quota page; `epoch` is that of
/// the gate word that said CLOSED, or for `Idle` YIELD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "`gpu` and `epoch`, above")]
pub enum Message {
    /// Tenant: I use CUDA. The peer's credentials, not this, say who it is.
    Hello {
        /// The slot claimed in the usage page.
        slot: u32,
        /// The pid in the tenant's own namespace, a hint for people.
        pid: u32,
        /// The generation of the quota page attached to.
        generation: u64,
    },
    /// Plugin: heard; sessions of this generation are served.
    Welcome {
        /// The quota page's generation now.
        generation: u64,
    },
    /// Tenant: work is waiting at the gate of this GPU.
    Want { gpu: u32 },
    /// Tenant: nothing of ours is in flight on this GPU any more.
    Drained {
        gpu: u32,
        epoch: u32,
        /// GPU time used since the last grant, nanoseconds, as the tenant believes: a statistic.
        used_ns: u64,
    },
    /// Tenant: nothing of ours goes on. While the gate says YIELD: nothing has been in flight for a
    /// while, and nobody of us waits. While it says CLOSED: nothing of what is in flight has completed
    /// for a while; or, after `Drained` of that epoch, it did only when launches were let pass.
    Idle { gpu: u32, epoch: u32 },
    /// Tenant: closed for a while, and not drained. Says so now and then, and when that changes; and that
    /// the GPU works, once, when what is in flight is expected to be complete at once.
    Late {
        gpu: u32,
        epoch: u32,
        /// Whether the GPU works for the process, as far as is known. Else what is in flight waits
        /// for a host function, or for a word that somebody writes.
        works: bool,
    },
    /// Tenant, at the gates of all shares of a process that has several: it is the one of this token. It keeps
    /// to the gate of one of them, where it has said hello.
    Joins {
        /// The process's own number, which it alone knows: the same at all of its gates.
        token: u64,
        /// Whether this is the gate that it keeps to.
        leads: bool,
    },
    /// Tenant: something happened that an operator wants to hear of.
    Event(Event),
}

/// See [`Message::Event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// Index in the quota page, where the GPU is there.
    pub gpu: Option<u32>,
    /// Bytes asked for, where the event is about memory.
    pub bytes: u64,
    /// The GPU's UUID, NUL-padded, where the GPU is not in the quota page; else zeros.
    pub uuid: [u8; EVENT_UUID_LEN],
}

/// See [`Event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum EventKind {
    /// A request was refused because of the quota.
    OverQuota = 1,
    /// A request within the quota was refused by the driver.
    DriverRefused = 2,
    /// A GPU is visible to the process but absent from the quota page: its limit is 0.
    UnknownGpu = 3,
    /// The process could use no slot (all taken, or no descriptor left).
    NoSlot = 4,
    /// The process made a context: memory that no call shows has just been taken.
    ContextMade = 5,
}

/// The kinds of messages, by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "see `Message`")]
#[repr(u32)]
pub enum Kind {
    Hello = 1,
    Welcome = 2,
    Want = 3,
    Drained = 4,
    Event = 5,
    Idle = 6,
    Late = 7,
    Joins = 8,
}

impl Kind {
    /// Every kind that the protocol has.
    pub const ALL: &[Self] = &[
        Self::Hello,
        Self::Welcome,
        Self::Want,
        Self::Drained,
        Self::Event,
        Self::Idle,
        Self::Late,
        Self::Joins,
    ];

    fn from_u32(value: u32) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| *kind as u32 == value)
    }
}

/// An event's GPU index when there is none.
const NO_GPU: u32 = u32::MAX;

impl Message {
    /// A valid message of this kind, whose fields all follow from `number`: for floods, which say something
    /// new each time.
    #[cfg(feature = "std")]
    pub fn specimen(kind: Kind, number: u64) -> Self {
        let low = u32::try_from(number % (1 << 32)).unwrap_or(0);
        let below = |bound: usize| u32::try_from(number % bound as u64).unwrap_or(0);
        let (gpu, flag) = (below(MAX_GPUS), number.is_multiple_of(2));
        match kind {
            Kind::Hello => Self::Hello { slot: below(SLOTS), pid: low, generation: number },
            Kind::Welcome => Self::Welcome { generation: number },
            Kind::Want => Self::Want { gpu },
            Kind::Drained => Self::Drained { gpu, epoch: low, used_ns: number },
            Kind::Idle => Self::Idle { gpu, epoch: low },
            Kind::Late => Self::Late { gpu, epoch: low, works: flag },
            Kind::Joins => Self::Joins { token: number, leads: flag },
            Kind::Event => {
                let mut uuid = [0; EVENT_UUID_LEN];
                uuid[..8].copy_from_slice(&number.to_le_bytes());
                let kind = EventKind::from_u32(below(5) + 1).unwrap_or(EventKind::OverQuota);
                Self::Event(Event { kind, gpu: Some(gpu), bytes: number, uuid })
            }
        }
    }

    /// The bytes to send, of this program's own version. Does not allocate.
    pub fn encode(&self) -> [u8; MESSAGE_BYTES] {
        self.encode_as(abi::version())
    }

    /// The bytes to send to somebody who speaks `abi`. Does not allocate.
    pub fn encode_as(&self, abi: u32) -> [u8; MESSAGE_BYTES] {
        let mut packet = Packet::new(abi);
        match *self {
            Self::Hello { slot, pid, generation } => {
                packet.start(Kind::Hello).u32(slot).u32(pid).u64(generation);
            }
            Self::Welcome { generation } => {
                packet.start(Kind::Welcome).u64(generation);
            }
            Self::Want { gpu } => {
                packet.start(Kind::Want).u32(gpu);
            }
            Self::Drained { gpu, epoch, used_ns } => {
                packet.start(Kind::Drained).u32(gpu).u32(epoch).u64(used_ns);
            }
            Self::Idle { gpu, epoch } => {
                packet.start(Kind::Idle).u32(gpu).u32(epoch);
            }
            Self::Late { gpu, epoch, works } => {
                packet.start(Kind::Late).u32(gpu).u32(epoch).u32(works.into());
            }
            Self::Joins { token, leads } => {
                packet.start(Kind::Joins).u64(token).u32(leads.into());
            }
            Self::Event(event) => {
                let gpu = event.gpu.unwrap_or(NO_GPU);
                packet.start(Kind::Event).u32(event.kind as u32).u32(gpu);
                packet.u64(event.bytes).bytes(&event.uuid);
            }
        }
        packet.bytes
    }

    /// The message in a packet as received from somebody of this program's own version; `None` where it is none.
    pub fn decode(packet: &[u8]) -> Option<Self> {
        Self::decode_if(packet, |abi| abi == abi::version()).map(|(message, _)| message)
    }

    /// The plugin's side: the message of any version that the plugin speaks, and which its sender does.
    pub fn decode_spoken(packet: &[u8]) -> Option<(Self, u32)> {
        Self::decode_if(packet, abi::speaks)
    }

    fn decode_if(packet: &[u8], spoken: impl Fn(u32) -> bool) -> Option<(Self, u32)> {
        let mut fields = Fields { bytes: packet.try_into().ok()?, at: 0 };
        if fields.bytes::<2>() != MAGIC {
            return None;
        }
        let abi = u32::from(u16::from_le_bytes(fields.bytes()));
        if !spoken(abi) {
            return None;
        }
        let message = match Kind::from_u32(fields.u32())? {
            Kind::Hello => Self::Hello {
                slot: fields.below(SLOTS)?,
                pid: fields.u32(),
                generation: fields.u64(),
            },
            Kind::Welcome => Self::Welcome { generation: fields.u64() },
            Kind::Want => Self::Want { gpu: fields.below(MAX_GPUS)? },
            Kind::Drained => Self::Drained {
                gpu: fields.below(MAX_GPUS)?,
                epoch: fields.u32(),
                used_ns: fields.u64(),
            },
            Kind::Idle => Self::Idle { gpu: fields.below(MAX_GPUS)?, epoch: fields.u32() },
            Kind::Late => Self::Late {
                gpu: fields.below(MAX_GPUS)?,
                epoch: fields.u32(),
                works: fields.below(2)? == 1,
            },
            Kind::Joins => Self::Joins { token: fields.u64(), leads: fields.below(2)? == 1 },
            Kind::Event => Self::Event(Event {
                kind: EventKind::from_u32(fields.u32())?,
                gpu: fields.gpu_or_none()?,
                bytes: fields.u64(),
                uuid: fields.bytes(),
            }),
        };
        fields.rest_is_zero().then_some((message, abi))
    }
}

impl EventKind {
    fn from_u32(value: u32) -> Option<Self> {
        [Self::OverQuota, Self::DriverRefused, Self::UnknownGpu, Self::NoSlot, Self::ContextMade]
            .into_iter()
            .find(|kind| *kind as u32 == value)
    }
}

/// A message being written.
struct Packet {
    bytes: [u8; MESSAGE_BYTES],
    at: usize,
    abi: u32,
}

impl Packet {
    fn new(abi: u32) -> Self {
        Self { bytes: [0; MESSAGE_BYTES], at: 0, abi }
    }

    fn start(&mut self, kind: Kind) -> &mut Self {
        let abi = u16::try_from(self.abi).unwrap_or(u16::MAX);
        self.bytes(&MAGIC).bytes(&abi.to_le_bytes()).u32(kind as u32)
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    fn bytes(&mut self, value: &[u8]) -> &mut Self {
        self.bytes[self.at..self.at + value.len()].copy_from_slice(value);
        self.at += value.len();
        self
    }
}

/// A message being read.
struct Fields<'a> {
    bytes: &'a [u8; MESSAGE_BYTES],
    at: usize,
}

impl Fields<'_> {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut value = [0; N];
        value.copy_from_slice(&self.bytes[self.at..self.at + N]);
        self.at += N;
        value
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }

    fn below(&mut self, bound: usize) -> Option<u32> {
        let value = self.u32();
        usize::try_from(value).is_ok_and(|index| index < bound).then_some(value)
    }

    /// An event's; the inner `None` where it has none.
    fn gpu_or_none(&mut self) -> Option<Option<u32>> {
        if self.bytes[self.at..self.at + 4] == NO_GPU.to_le_bytes() {
            self.at += 4;
            return Some(None);
        }
        self.below(MAX_GPUS).map(Some)
    }

    fn rest_is_zero(&self) -> bool {
        self.bytes[self.at..].iter().all(|&byte| byte == 0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_kind_has_messages_that_differ_and_are_decoded() {
        for &kind in Kind::ALL {
            let all: Vec<Message> = (0..3).map(|number| Message::specimen(kind, number)).collect();
            assert!(all[0] != all[1] && all[1] != all[2], "{all:?}");
            for message in all {
                let bytes = message.encode();
                assert_eq!(bytes[4..8], (kind as u32).to_le_bytes(), "{kind:?}");
                assert_eq!(Message::decode(&bytes), Some(message));
            }
        }
    }

    proptest! {
        #[test]
        fn whatever_is_accepted_has_one_encoding(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            if let Some(message) = Message::decode(&bytes) {
                prop_assert_eq!(&message.encode()[..], &bytes[..]);
            }
        }
    }

    #[test]
    fn what_is_no_message_of_this_version_is_refused() {
        let good = Message::Want { gpu: 3 }.encode();
        for packet in [&good[..0], &good[..63], &[0; 65][..]] {
            assert_eq!(Message::decode(packet), None);
        }
        // In the magic, the version, the kind, the GPU and behind it.
        for (at, byte) in [(0, b'X'), (2, 9), (4, 99), (8, 16), (63, 1)] {
            let mut bytes = good;
            bytes[at] = byte;
            assert_eq!(Message::decode(&bytes), None, "{at}");
        }
    }

    #[test]
    fn the_bytes_are_the_documented_ones() {
        let bytes = Message::Drained { gpu: 1, epoch: 2, used_ns: 3 }.encode();
        assert_eq!(
            bytes[..24],
            [b'T', b'S', 1, 0, 4, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]
        );
        assert!(bytes[24..].iter().all(|&byte| byte == 0));
    }
}
