//! Finds the places in JSON at which something begins or ends, 64 bytes at a time and without a branch per byte.
//!
//! A parser that goes from byte to byte ends each blank, string and number with a branch that the processor cannot
//! predict. The index turns 64 bytes into masks, one bit per byte, and computes with these. The parser then
//! goes from mark to mark. The idea and the computation of the strings are those of stage 1 of simdjson
//! (Langdale and Lemire, "Parsing Gigabytes of JSON per Second", VLDB Journal 28, 2019). Blocks with a
//! backslash are rare in traces, and are read byte by byte.
//!
//! The marks are:
//! - outside of strings: `{`, `}`, `[`, `]`, `:`, `,`, a quote, and the first of each run of other bytes that
//!   are not blank. This is the start of a number or a literal, or something wrong.
//! - in strings: the backslash of each escape, and the quote at the end.
//!
//! Input: the bytes of a file, piece by piece. Output: the places of the marks. This module does not know
//! whether the JSON is well formed.

use super::sixteen::Sixteen;

/// Bytes that are indexed together.
const BLOCK_BYTES: usize = 64;

/// The most bytes that are indexed at a time. Few enough that they and their marks stay in the first-level
/// cache until the parser comes to them.
pub(super) const PIECE_BYTES: usize = 8 << 10;

/// The state after the bytes so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct State {
    is_in_string: bool,
    /// Whether the last byte is a backslash in a string, so that the next byte belongs to an escape.
    is_in_escape: bool,
    /// Whether the last byte belongs to a run of bytes whose first one was marked.
    is_in_run: bool,
}

/// The marks of a piece, and the state after it.
pub(super) struct Index {
    state: State,
    /// The places of the marks are `marks[next..end]`. The first element is kept free for [`Index::put_back`].
    marks: Vec<u32>,
    next: usize,
    end: usize,
}

impl Index {
    /// The index of no bytes.
    pub(super) fn new() -> Self {
        // A block may write `BLOCK_BYTES` marks, however many it has.
        let marks = vec![0; 1 + PIECE_BYTES + BLOCK_BYTES];
        Self { state: State::default(), marks, next: 1, end: 1 }
    }

    /// The place of the next mark; `None` if no mark is left in the piece.
    #[inline]
    pub(super) fn mark(&self) -> Option<usize> {
        if self.next < self.end { Some(self.marks[self.next] as usize) } else { None }
    }

    /// The places of the marks after the next `skipped` ones; `None` if fewer are left in the piece.
    #[inline]
    pub(super) fn marks_from<const COUNT: usize>(&self, skipped: usize) -> Option<[usize; COUNT]> {
        let marks = self.marks[..self.end].get(self.next + skipped..)?.first_chunk::<COUNT>()?;
        Some(marks.map(|mark| mark as usize))
    }

    /// Steps over the next marks.
    #[inline]
    pub(super) fn step(&mut self, count: usize) {
        self.next += count;
    }

    /// Makes `place` the next mark. At least one mark of the piece, or the end of the piece before, must have
    /// been stepped over since the last call.
    pub(super) fn put_back(&mut self, place: usize) {
        self.next -= 1;
        self.marks[self.next] = place as u32;
    }

    /// Replaces the marks by those of the next piece, `bytes[start..]`, of at most [`PIECE_BYTES`]. Places are
    /// counted from the start of `bytes`.
    pub(super) fn read(&mut self, bytes: &[u8], start: usize) {
        (self.next, self.end) = (1, 1);
        let mut at = start;
        let (blocks, rest) = bytes[start..].as_chunks::<BLOCK_BYTES>();
        for block in blocks {
            self.add(block, BLOCK_BYTES, at);
            at += BLOCK_BYTES;
        }
        if !rest.is_empty() {
            // Blanks have no marks and do not change the strings.
            let mut block = [b' '; BLOCK_BYTES];
            block[..rest.len()].copy_from_slice(rest);
            self.add(&block, rest.len(), at);
        }
    }

    /// Adds the marks of the first `len` bytes of a block; all others are blanks.
    #[inline(always)]
    fn add(&mut self, block: &[u8; BLOCK_BYTES], len: usize, start: usize) {
        let (mut marks, state) = fast(Classes::of(block), len, self.state)
            .unwrap_or_else(|| plain(&block[..len], self.state));
        self.state = state;
        let room = self.marks[self.end..]
            .first_chunk_mut::<BLOCK_BYTES>()
            .expect("there is room for a block");
        self.end += marks.count_ones() as usize;
        // Without a branch per mark: marks written after the last one are not used.
        for eight in room.as_chunks_mut::<8>().0 {
            for place in eight {
                *place = start as u32 + marks.trailing_zeros();
                marks &= marks.wrapping_sub(1);
            }
            if marks == 0 {
                break;
            }
        }
    }
}

/// The marks of a block, one bit per byte, and the state after its first `len` bytes; all others are blanks.
/// `None` if there are escapes.
#[inline(always)]
fn fast(classes: Classes, len: usize, state: State) -> Option<(u64, State)> {
    let Classes { quote, backslash, blank, structure } = classes;
    if backslash != 0 || state.is_in_escape {
        return None;
    }
    // From the quote at the start of each string to the byte before the quote at its end.
    let string = up_to_here(quote) ^ mask(state.is_in_string);
    let run = !(string | quote | blank | structure);
    let starts = run & !(run << 1 | u64::from(state.is_in_run));
    let marks = quote | structure & !string | starts;
    let last = 1 << (len - 1);
    let state =
        State { is_in_string: string & last != 0, is_in_escape: false, is_in_run: run & last != 0 };
    Some((marks, state))
}

/// The same as [`fast`], for any bytes, one after the other.
fn plain(bytes: &[u8], mut state: State) -> (u64, State) {
    let mut marks = 0;
    for (at, &byte) in bytes.iter().enumerate() {
        let State { is_in_string, is_in_escape, is_in_run } = state;
        state = State::default();
        let is_marked = if is_in_string {
            state.is_in_escape = byte == b'\\' && !is_in_escape;
            let is_end = byte == b'"' && !is_in_escape;
            state.is_in_string = !is_end;
            is_end || state.is_in_escape
        } else {
            state.is_in_string = byte == b'"';
            let is_blank = matches!(byte, b' ' | b'\n' | b'\r' | b'\t');
            let is_structure = matches!(byte, b'{' | b'}' | b'[' | b']' | b':' | b',');
            state.is_in_run = !(is_blank || is_structure || state.is_in_string);
            is_structure || state.is_in_string || state.is_in_run && !is_in_run
        };
        marks |= u64::from(is_marked) << at;
    }
    (marks, state)
}

/// The classes of the bytes of a block, one bit per byte.
#[derive(Default)]
struct Classes {
    quote: u64,
    backslash: u64,
    blank: u64,
    structure: u64,
}

impl Classes {
    #[inline(always)]
    fn of(block: &[u8; BLOCK_BYTES]) -> Self {
        let mut all = Self::default();
        // The lowest bit is that of the first byte.
        for &bytes in block.as_chunks::<16>().0.iter().rev() {
            let bytes = Sixteen::new(bytes);
            let is = |byte: u8| bytes.is(byte);
            // Brackets and braces differ in one bit.
            let either = bytes.or(Sixteen::splat(0x20));
            let is_either = |byte: u8| either.is(byte);
            let add = |bits: &mut u64, found: Sixteen| *bits = *bits << 16 | found.bits();
            add(&mut all.quote, is(b'"'));
            add(&mut all.backslash, is(b'\\'));
            add(&mut all.blank, is(b' ').or(is(b'\n')).or(is(b'\r')).or(is(b'\t')));
            add(&mut all.structure, is_either(b'{').or(is_either(b'}')).or(is(b',')).or(is(b':')));
        }
        all
    }
}

/// Each bit is the exclusive or of the bits of `bits` up to and with the same place.
fn up_to_here(mut bits: u64) -> u64 {
    for distance in [1, 2, 4, 8, 16, 32] {
        bits ^= bits << distance;
    }
    bits
}

/// All ones or all zeros.
fn mask(is: bool) -> u64 {
    u64::from(is).wrapping_neg()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All marks of a text that is indexed in pieces of `piece` bytes, from a place that is not a multiple of 64.
    fn marks(text: &[u8], piece: usize) -> Vec<usize> {
        let mut index = Index::new();
        let mut marks = Vec::new();
        for start in (0..text.len()).step_by(piece) {
            index.read(&text[..text.len().min(start + piece)], start);
            while let Some(mark) = index.mark() {
                marks.push(mark);
                index.step(1);
            }
        }
        marks
    }

    /// The same by the plain function alone, byte by byte.
    fn plain_marks(text: &[u8]) -> Vec<usize> {
        let mut state = State::default();
        let mut is_marked = |byte: &u8| {
            let (marks, next) = plain(std::slice::from_ref(byte), state);
            state = next;
            marks == 1
        };
        (0..text.len()).filter(|&at| is_marked(&text[at])).collect()
    }

    #[test]
    fn marks_are_where_something_begins_or_ends() {
        let text = br#"{"a\"b": [12, -3.5 ,true ] , "": "\\"}x"y"#;
        let marked: String = plain_marks(text).iter().map(|&at| char::from(text[at])).collect();
        assert_eq!(marked, r#"{"\":[1,-,t],"":"\"}x""#);
    }

    #[test]
    fn blocks_have_the_marks_of_their_bytes() {
        // Long runs without a backslash, so that blocks are read in both ways, and whole bytes at random.
        let mut bits = 1u64;
        let mut next = |limit: u64| {
            bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (bits >> 33) % limit
        };
        for round in 0..300 {
            let backslashes = [0, 1, 30][round % 3];
            let byte = |_| match next(100) {
                kind if kind < backslashes => b'\\',
                0..60 => b"{}[]:,\"\" \n\r\t\"1a"[next(15) as usize],
                _ => next(256) as u8,
            };
            let text: Vec<u8> = (0..1000 + round).map(byte).collect();
            let expected = plain_marks(&text);
            for piece in [1, 5, 63, 64, 65, 200, PIECE_BYTES] {
                let marks = marks(&text, piece);
                assert_eq!(marks, expected, "pieces of {piece} of {:?}", text.escape_ascii());
            }
        }
    }

    #[test]
    fn a_mark_that_is_put_back_comes_first() {
        let mut index = Index::new();
        index.read(b"12x, 3", 0);
        index.step(1);
        index.put_back(2);
        assert_eq!(index.marks_from(0), Some([2, 3, 5]));
    }
}
