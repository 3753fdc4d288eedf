//! Where a text can be cut so that the tokens of its pieces, one after the other, are those of the whole text.
//!
//! Input: a tokenizer, and texts. Output: pieces. This is known for tokenizers of certain parts only; with others, a text
//! is one piece.

use tokenizers::{NormalizerWrapper, PreTokenizerWrapper};

/// The positions at which texts can be cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cuts {
    /// After the end of a line that has other characters than spaces before it and a letter after it.
    after_lines: bool,
    /// Before a space between two letters of ASCII.
    between_words: bool,
}

impl Cuts {
    pub fn of(tokenizer: &tokenizers::Tokenizer) -> Self {
        let added = tokenizer.get_added_tokens_decoder();
        let is_local = tokenizer.get_normalizer().is_none_or(is_local);
        let divides = is_local && tokenizer.get_pre_tokenizer().is_some_and(divides_lines);
        // Added tokens are looked for first. One could lie on both sides of a cut, or take the spaces around it.
        let after_lines = !added.values().any(|token| token.lstrip || token.content.contains('\n'));
        let between_words = !added.values().any(|token| {
            token.lstrip || token.rstrip || token.content.contains(char::is_whitespace)
        });
        Self { after_lines: divides && after_lines, between_words: divides && between_words }
    }

    /// The pieces of a text. All but the last one have at least `len` bytes.
    pub fn pieces(self, text: &str, len: usize) -> impl Iterator<Item = &str> {
        let mut rest = text;
        std::iter::from_fn(move || {
            let (piece, left) = match self.first_from(rest, len) {
                Some(at) => rest.split_at(at),
                None => (rest, ""),
            };
            rest = left;
            (!piece.is_empty()).then_some(piece)
        })
    }

    /// The first position to cut a text after at least `len` bytes.
    fn first_from(self, text: &str, len: usize) -> Option<usize> {
        let bytes = text.as_bytes();
        let is_letter = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_alphabetic);
        let mut positions = len.max(1)..bytes.len();
        positions.find(|&at| {
            let is_between_words =
                bytes[at] == b' ' && is_letter(at - 1) && is_letter(at + 1) && self.between_words;
            is_between_words || (bytes[at - 1] == b'\n' && self.after_lines && ends_line(text, at))
        })
    }
}

/// Whether the line that ends before `at` has no space at its end, and a letter follows.
fn ends_line(text: &str, at: usize) -> bool {
    let is_letter = text[at..].chars().next().is_some_and(char::is_alphabetic);
    let is_after_space = text[..at - 1].chars().next_back().is_none_or(char::is_whitespace);
    is_letter && !is_after_space
}

/// Whether a normalizer changes characters one by one, or composes them, which neither the end of a line nor a space between
/// two letters of ASCII takes part in.
fn is_local(normalizer: &NormalizerWrapper) -> bool {
    use NormalizerWrapper::{Lowercase, NFC, NFD, NFKC, NFKD, Sequence};
    match normalizer {
        NFC(_) | NFD(_) | NFKC(_) | NFKD(_) | Lowercase(_) => true,
        Sequence(all) => all.as_ref().iter().all(is_local),
        _ => false,
    }
}

/// Whether a pre-tokenizer always divides a text after the end of a line that has other characters than spaces around
/// it, and before a space between two letters, and makes nothing else of the beginning or the end of a text.
///
/// The pattern of `ByteLevel` is `\s+(?!\S)|\s+` where there are spaces: a single one is a part of its own before a
/// letter and at the end of a text, or a part together with the word after it. Of two spaces, only the second one is, and at the
/// end of a text both are one part.
fn divides_lines(pre_tokenizer: &PreTokenizerWrapper) -> bool {
    use PreTokenizerWrapper::{
        BertPreTokenizer, ByteLevel, Digits, Punctuation, Sequence, Whitespace, WhitespaceSplit,
    };
    match pre_tokenizer {
        ByteLevel(bytes) => bytes.use_regex && !bytes.add_prefix_space,
        BertPreTokenizer(_) | Whitespace(_) | WhitespaceSplit(_) => true,
        // Those before the one that divides must leave the cut between its neighbors. Those after it get the same parts.
        Sequence(all) => {
            let keeps = |part: &&PreTokenizerWrapper| matches!(part, Digits(_) | Punctuation(_));
            let mut rest = all.as_ref().iter().skip_while(keeps);
            rest.next().is_some_and(divides_lines) && rest.all(|part| keeps(&part))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(text: &str, len: usize, after_lines: bool, between_words: bool) -> Vec<&str> {
        Cuts { after_lines, between_words }.pieces(text, len).collect()
    }

    #[test]
    fn pieces_end_before_lines_that_begin_with_a_letter() {
        let pieces = |text, len| pieces(text, len, true, false);
        assert_eq!(pieces("ab\ncd\n\n e\nf", 1), ["ab\n", "cd\n\n e\n", "f"]);
        assert_eq!(pieces("\nab\n\ncd \ne\r\nf\ng", 1), ["\nab\n\ncd \ne\r\nf\n", "g"]);
        assert_eq!(pieces("ab\ncd\nef", 4), ["ab\ncd\n", "ef"]);
        assert_eq!(pieces("", 4), Vec::<&str>::new());
        assert_eq!(pieces("ä\nö", 1), ["ä\n", "ö"]);
    }

    #[test]
    fn pieces_end_before_a_space_between_letters() {
        let pieces = |text, len| pieces(text, len, false, true);
        assert_eq!(pieces("ab cd  ef g", 1), ["ab", " cd  ef", " g"]);
        assert_eq!(pieces("1 b, c ö d\te f ", 1), ["1 b, c ö d\te", " f "]);
        assert_eq!(pieces("ab cd ef", 4), ["ab cd", " ef"]);
        assert_eq!(super::tests::pieces("ab cd\nef", 1, false, false), ["ab cd\nef"]);
    }
}
