//! Packets of the session socket.

use tessera_region::session::{MESSAGE_BYTES, Message};

/// Whatever decodes says exactly the packet it came from; both ends use the same code.
pub fn session(data: &[u8]) {
    for packet in data.chunks(MESSAGE_BYTES).chain([data]) {
        if let Some(message) = Message::decode(packet) {
            assert_eq!(message.encode(), packet, "{message:?}");
        }
    }
    // Most inputs end at the header, so also look at what comes behind a sound one.
    let mut packet = Message::Welcome { generation: 0 }.encode();
    for (to, from) in packet[4..].iter_mut().zip(data) {
        *to = *from;
    }
    if let Some(message) = Message::decode(&packet) {
        assert_eq!(message.encode(), packet, "{message:?}");
    }
}
