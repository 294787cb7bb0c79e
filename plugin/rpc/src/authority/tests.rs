//! The rewriter against blocks written by hand and by loona's encoder, cut in every way.

use std::collections::VecDeque;
use std::future::poll_fn;

use proptest::prelude::*;

use super::*;

const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const CONTINUATION: u8 = 9;

type Fields = Vec<(Vec<u8>, Vec<u8>)>;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let [.., l0, l1, l2] = payload.len().to_be_bytes();
    let mut bytes = vec![l0, l1, l2, kind, flags];
    bytes.extend_from_slice(&stream.to_be_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

fn preface() -> Vec<u8> {
    [&PREFACE[..], &frame(SETTINGS, 0, 0, &[])].concat()
}

/// Feeds `input` in pieces of the given sizes, over and over.
fn rewrite(input: &[u8], pieces: &[usize]) -> Result<Vec<u8>, Error> {
    let mut rewriter = Rewriter::default();
    let (mut rest, mut out) = (input, vec![]);
    for piece in pieces.iter().cycle() {
        let (now, later) = rest.split_at((*piece).min(rest.len()));
        rewriter.feed(now, &mut out)?;
        rest = later;
        if rest.is_empty() {
            break;
        }
    }
    Ok(out)
}

/// What a server reads: frames with header blocks joined and decoded.
#[derive(Debug, PartialEq)]
enum Read {
    Block { stream: u32, end_stream: bool, fields: Fields },
    Other(Vec<u8>),
}

fn read(bytes: &[u8]) -> Vec<Read> {
    let mut decoder = Decoder::new();
    // A server that never saw an indexed field: any reference to the dynamic table fails here.
    decoder.set_max_table_size(0);
    let mut rest = bytes.strip_prefix(&PREFACE[..]).expect("preface");
    let (mut seen, mut open) = (vec![], None::<(u32, u8, Vec<u8>)>);
    while !rest.is_empty() {
        let length = usize::from(rest[0]) << 16 | usize::from(rest[1]) << 8 | usize::from(rest[2]);
        assert!(length <= 16_384, "frame of {length} bytes");
        let (kind, flags) = (rest[3], rest[4]);
        let stream = u32::from_be_bytes([rest[5], rest[6], rest[7], rest[8]]);
        let (whole, later) = rest.split_at(9 + length);
        rest = later;
        match (kind, &mut open) {
            (HEADERS, None) => open = Some((stream, flags, whole[9..].to_vec())),
            (CONTINUATION, Some((first, _, block))) if *first == stream => {
                block.extend_from_slice(&whole[9..]);
            }
            (HEADERS | CONTINUATION, _) | (_, Some(_)) => panic!("interrupted header block"),
            _ => {
                seen.push(Read::Other(whole.to_vec()));
                continue;
            }
        }
        if flags & END_HEADERS != 0 {
            let (stream, flags, block) = open.take().unwrap();
            assert_eq!(flags & (PADDED | PRIORITY), 0);
            seen.push(Read::Block {
                stream,
                end_stream: flags & END_STREAM != 0,
                fields: decoder.decode(&block).expect("valid block"),
            });
        }
    }
    assert!(open.is_none());
    seen
}

fn fields(list: &[(&str, &str)]) -> Fields {
    list.iter().map(|(name, value)| (name.as_bytes().to_vec(), value.as_bytes().to_vec())).collect()
}

/// Encodes as grpc-go does: every field goes into the dynamic table and is referred to while it is
/// there.
#[derive(Default)]
struct Encoder {
    table: VecDeque<(Vec<u8>, Vec<u8>)>,
}

impl Encoder {
    fn encode(&mut self, list: &Fields) -> Vec<u8> {
        let mut block = vec![];
        for field in list {
            if let Some(index) = self.table.iter().position(|entry| entry == field) {
                put_integer(&mut block, 0x80, 7, 62 + index);
                continue;
            }
            block.push(0x40);
            for string in [&field.0, &field.1] {
                put_integer(&mut block, 0, 7, string.len());
                block.extend(string);
            }
            self.table.push_front(field.clone());
            let size = |table: &VecDeque<(Vec<u8>, Vec<u8>)>| -> usize {
                table.iter().map(|(name, value)| name.len() + value.len() + 32).sum()
            };
            while size(&self.table) > 4096 {
                self.table.pop_back();
            }
        }
        block
    }
}

/// RFC 7541 §5.1.
fn put_integer(out: &mut Vec<u8>, pattern: u8, prefix: u32, number: usize) {
    let limit = 2_usize.pow(prefix) - 1;
    let byte = |number: usize| u8::try_from(number).unwrap();
    if number < limit {
        out.push(pattern | byte(number));
        return;
    }
    out.push(pattern | byte(limit));
    let mut rest = number - limit;
    while rest >= 128 {
        out.push(byte(rest % 128) | 0x80);
        rest /= 128;
    }
    out.push(byte(rest));
}

/// As kubelet 1.20's grpc-go sends it.
fn request() -> Fields {
    fields(&[
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/v1beta1.DevicePlugin/ListAndWatch"),
        (":authority", "%2Fvar%2Flib%2Fkubelet%2Fdevice-plugins%2Ftessera.sock"),
        ("content-type", "application/grpc"),
        ("user-agent", "grpc-go/1.27.1"),
        ("te", "trailers"),
    ])
}

/// What becomes of a list of fields.
fn expected(list: &Fields) -> Fields {
    let mut list = list.clone();
    for (name, value) in &mut list {
        if name == b":authority" {
            *value = b"localhost".to_vec();
        }
    }
    list
}

fn block(stream: u32, fields: &Fields) -> Read {
    Read::Block { stream, end_stream: false, fields: expected(fields) }
}

#[test]
fn table_size_updates_are_followed_and_not_passed_on() {
    let mut input = preface();
    // "001" and the new size in five bits: 0, then 4096 again.
    let mut update = vec![0x20, 0x3f, 0xe1, 0x1f];
    update.extend(Encoder::default().encode(&request()));
    input.extend(frame(HEADERS, END_HEADERS, 1, &update));
    assert_eq!(read(&rewrite(&input, &[usize::MAX]).unwrap())[1], block(1, &request()));
    // More than the server allows.
    let too_large = [preface(), frame(HEADERS, END_HEADERS, 1, &[0x3f, 0xe2, 0x1f, 0x82])].concat();
    assert!(matches!(rewrite(&too_large, &[usize::MAX]), Err(Error::Malformed(_))));
}

#[test]
fn a_block_that_grows_beyond_a_frame_is_continued() {
    // References to one entry of a kilobyte: a byte each becomes a kilobyte each.
    let mut encoder = Encoder::default();
    let field = (b"name".to_vec(), vec![b'v'; 1000]);
    let mut payload = encoder.encode(&vec![field.clone()]);
    payload.extend(std::iter::repeat_n(0xbe, 29));
    let input = [
        preface(),
        frame(HEADERS, END_HEADERS | END_STREAM | PRIORITY, 7, &[&[0; 5], &payload[..]].concat()),
    ]
    .concat();
    let output = rewrite(&input, &[usize::MAX]).unwrap();
    assert!(output.len() > 16_384 + 1000);
    assert!(matches!(&read(&output)[1], Read::Block { stream: 7, end_stream: true, fields, .. }
        if *fields == vec![field; 30]));
}

#[test]
fn what_is_not_http2_ends_the_connection() {
    let error = |input: &[u8]| rewrite(input, &[usize::MAX]).unwrap_err();
    let with_preface = |frames: &[Vec<u8>]| [preface(), frames.concat()].concat();
    assert_eq!(error(b"GET / HTTP/1.1\r\n\r\n"), Error::Preface);
    assert_eq!(error(b"PRI * HTTP/2.0\r\n\r\nXX"), Error::Preface);
    assert_eq!(error(&with_preface(&[frame(CONTINUATION, END_HEADERS, 1, &[0x82])])), Error::Stray);
    let open = frame(HEADERS, 0, 1, &[0x82]);
    let interrupted = |with: Vec<u8>| error(&with_preface(&[open.clone(), with]));
    assert_eq!(interrupted(frame(DATA, 0, 1, b"x")), Error::Interrupted(DATA));
    assert_eq!(interrupted(frame(HEADERS, END_HEADERS, 3, &[0x82])), Error::Interrupted(HEADERS));
    assert_eq!(
        interrupted(frame(CONTINUATION, END_HEADERS, 3, &[0x82])),
        Error::Interrupted(CONTINUATION)
    );
    let short = |flags, payload: &[u8]| {
        error(&with_preface(&[frame(HEADERS, END_HEADERS | flags, 1, payload)]))
    };
    assert_eq!(short(PADDED, &[]), Error::Short);
    assert_eq!(short(PADDED, &[9, 0x82]), Error::Short);
    assert_eq!(short(PRIORITY, &[0; 4]), Error::Short);
    // Index 62 of an empty dynamic table, a string that is longer than the block, index 0.
    for block in [&[0xbe][..], &[0x00, 0x7f], &[0x80], &[0x00], &[0x41, 0xff, 0xff, 0xff, 0xff]] {
        let input = with_preface(&[frame(HEADERS, END_HEADERS, 1, block)]);
        assert!(matches!(error(&input), Error::Malformed(_)), "{block:?}");
    }
}

#[test]
fn the_size_of_a_block_is_bounded() {
    let large = |length: usize| frame(HEADERS, 0, 1, &vec![0x82; length]);
    let input = [preface(), large(16_384), frame(CONTINUATION, 0, 1, &[0x82; 16_384])].concat();
    assert_eq!(rewrite(&input, &[4096]), Err(Error::TooLarge));
    // A frame of 16 MiB is refused by its header: none of its payload is gathered.
    let header = [preface(), vec![0xff, 0xff, 0xff, HEADERS, 0, 0, 0, 0, 1]].concat();
    assert_eq!(rewrite(&header, &[usize::MAX]), Err(Error::TooLarge));
    // Small on the wire, large when decoded: 4 kB referred to again and again.
    let mut bomb = Encoder::default().encode(&vec![(b"x".to_vec(), vec![b'y'; 4000])]);
    bomb.extend(std::iter::repeat_n(0xbe, 10_000));
    let input = [preface(), frame(HEADERS, END_HEADERS, 1, &bomb)].concat();
    assert_eq!(rewrite(&input, &[usize::MAX]), Err(Error::TooLarge));
    // Empty frames without end.
    let mut flood = [preface(), frame(HEADERS, 0, 1, &[])].concat();
    for _ in 0..1000 {
        flood.extend(frame(CONTINUATION, 0, 1, &[]));
    }
    assert_eq!(rewrite(&flood, &[usize::MAX]), Err(Error::TooLarge));
}

/// What a server reads of a connection, and how that ends.
async fn served(mut source: &[u8]) -> (Vec<u8>, io::Result<()>) {
    let (mut requests, mut all) = (Requests::new(), vec![]);
    loop {
        let mut buffer = [0; 4000];
        let mut buffer = ReadBuf::new(&mut buffer);
        let read = poll_fn(|cx| requests.poll_read(&mut source, cx, &mut buffer)).await;
        all.extend_from_slice(buffer.filled());
        if read.is_err() || buffer.filled().is_empty() {
            return (all, read);
        }
    }
}

#[tokio::test]
async fn what_came_before_an_error_is_handed_on() {
    let good = [preface(), frame(HEADERS, END_HEADERS, 1, &[0x82])].concat();
    let input = [good.clone(), frame(CONTINUATION, END_HEADERS, 1, &[])].concat();
    let (out, end) = served(&input).await;
    assert_eq!(end.unwrap_err().kind(), io::ErrorKind::InvalidData);
    assert_eq!(out, rewrite(&good, &[usize::MAX]).unwrap());
    let input = [preface(), frame(DATA, 0, 1, &[7; 100_000])].concat();
    for bytes in [&input[..], &input[..50_000]] {
        let (out, end) = served(bytes).await;
        assert!(end.is_ok() && out == bytes);
    }
}

/// A frame of an imagined client.
#[derive(Clone, Debug)]
enum Sent {
    Other { kind: u8, flags: u8, stream: u32, payload: Vec<u8> },
    Request { stream: u32, flags: u8, padding: u8, fields: Fields, cuts: Vec<usize> },
}

fn header() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
    let names = prop_oneof![
        Just(b":authority".to_vec()),
        Just(b":path".to_vec()),
        Just(b"te".to_vec()),
        prop::collection::vec(any::<u8>(), 1..40),
    ];
    (names, prop::collection::vec(any::<u8>(), 0..300))
}

fn sent() -> impl Strategy<Value = Sent> {
    let kinds = prop_oneof![Just(0_u8), 2..9_u8, 10..=255_u8];
    let payload = prop::collection::vec(any::<u8>(), 0..300);
    let other = (kinds, any::<u8>(), any::<u32>(), payload)
        .prop_map(|(kind, flags, stream, payload)| Sent::Other { kind, flags, stream, payload });
    let lists = prop::collection::vec(header(), 0..12);
    let cuts = prop::collection::vec(0..400_usize, 0..5);
    let flags = any::<u8>().prop_map(|flags| flags & (END_STREAM | PADDED | PRIORITY));
    let request = (1..u32::MAX / 2, flags, any::<u8>(), lists, cuts).prop_map(
        |(stream, flags, padding, fields, cuts)| Sent::Request {
            stream,
            flags,
            padding,
            fields,
            cuts,
        },
    );
    prop_oneof![other, request]
}

/// The bytes of `sent`, and what a server should read.
fn write(all: &[Sent]) -> (Vec<u8>, Vec<Read>) {
    let mut encoder = Encoder::default();
    let (mut bytes, mut want) = (PREFACE.to_vec(), vec![]);
    for sent in all {
        match sent {
            Sent::Other { kind, flags, stream, payload } => {
                let frame = frame(*kind, *flags, *stream, payload);
                bytes.extend(&frame);
                want.push(Read::Other(frame));
            }
            Sent::Request { stream, flags, padding, fields, cuts } => {
                let block = encoder.encode(fields);
                let mut cuts: Vec<_> = cuts.iter().map(|cut| (*cut).min(block.len())).collect();
                cuts.extend([0, block.len()]);
                cuts.sort_unstable();
                let fragments: Vec<_> =
                    cuts.windows(2).map(|pair| &block[pair[0]..pair[1]]).collect();
                let mut payload = vec![];
                if flags & PADDED != 0 {
                    payload.push(*padding);
                }
                if flags & PRIORITY != 0 {
                    payload.extend([0, 0, 0, 0, 15]);
                }
                payload.extend(fragments[0]);
                if flags & PADDED != 0 {
                    payload.extend(vec![0; usize::from(*padding)]);
                }
                let end = |index| if index + 1 == fragments.len() { END_HEADERS } else { 0 };
                bytes.extend(frame(HEADERS, flags | end(0), *stream, &payload));
                for (index, fragment) in fragments.iter().enumerate().skip(1) {
                    bytes.extend(frame(CONTINUATION, end(index), *stream, fragment));
                }
                want.push(Read::Block {
                    stream: *stream,
                    end_stream: flags & END_STREAM != 0,
                    fields: expected(fields),
                });
            }
        }
    }
    (bytes, want)
}

proptest! {
    #[test]
    fn any_conversation_is_read_with_its_authority_replaced(
        all in prop::collection::vec(sent(), 0..12),
        pieces in prop::collection::vec(1..600_usize, 1..6),
    ) {
        let (bytes, want) = write(&all);
        let whole = rewrite(&bytes, &[usize::MAX]).unwrap();
        prop_assert_eq!(&read(&whole), &want);
        prop_assert_eq!(&rewrite(&bytes, &pieces).unwrap(), &whole);
        prop_assert_eq!(&rewrite(&bytes, &[1]).unwrap(), &whole);
    }
}
