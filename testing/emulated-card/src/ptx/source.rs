//! PTX text, cut into scopes, labels and statements that know their lines.
//!
//! Knows where comments, braces and semicolons are, and nothing of what a statement means.

/// A part of PTX text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PtxPart {
    /// A scope begins. The text is the head of a kernel, or empty.
    Open(String),
    Close,
    /// `name:`
    Label(String),
    /// A statement without its semicolon.
    Statement(String),
}

/// Directives that end with their line and do not change what a kernel does.
const IGNORED_LINES: [&str; 5] = [".version", ".target", ".address_size", ".loc", ".file"];

/// Cuts a text into parts, each with the number of the line on which it begins.
pub fn split(text: &str) -> Vec<(u32, PtxPart)> {
    let mut parts = Vec::new();
    let (mut buffer, mut begin, mut depth) = (String::new(), 0, 0);
    let (mut in_comment, mut in_section) = (false, false);
    // Whether the buffer holds nothing but spaces.
    let mut is_blank = true;
    for (index, line) in text.lines().enumerate() {
        let number = index as u32 + 1;
        let line = without_comments(line, &mut in_comment);
        let ignored = IGNORED_LINES.contains(&line.split_whitespace().next().unwrap_or_default());
        if is_blank && ignored {
            continue;
        }
        for c in line.chars().chain(['\n']) {
            if in_section {
                in_section = c != '}';
                continue;
            }
            if is_blank {
                begin = number;
            }
            // A text has a million characters, and only these can end a part.
            if !"{}:;".contains(c) {
                is_blank &= c.is_whitespace();
                buffer.push(if c.is_whitespace() { ' ' } else { c });
                continue;
            }
            let head = buffer.trim();
            let is_header = head.contains(".entry") || head.contains(".func");
            let is_label = depth == 0 && !head.is_empty() && !head.contains(char::is_whitespace);
            let part = match c {
                // Information for debuggers.
                '{' if head.starts_with(".section") => {
                    in_section = true;
                    buffer.clear();
                    is_blank = true;
                    continue;
                }
                '{' if head.is_empty() || is_header => PtxPart::Open(head.into()),
                '}' if head.is_empty() => PtxPart::Close,
                ':' if is_label && !head.starts_with('@') => PtxPart::Label(head.into()),
                ';' if depth == 0 => PtxPart::Statement(head.into()),
                c => {
                    depth += i32::from(c == '{') - i32::from(c == '}');
                    buffer.push(c);
                    is_blank = false;
                    continue;
                }
            };
            buffer.clear();
            is_blank = true;
            parts.push((begin, part));
        }
    }
    if !is_blank {
        parts.push((begin, PtxPart::Statement(buffer.trim().into())));
    }
    parts
}

/// The line without comments of both kinds. `in_comment` goes from line to line.
fn without_comments(line: &str, in_comment: &mut bool) -> String {
    let (mut out, mut rest) = (String::new(), line);
    loop {
        if *in_comment {
            let Some((_, after)) = rest.split_once("*/") else { return out };
            rest = after;
            *in_comment = false;
        }
        let (text, after) = match rest.find('/').map(|_| (rest.find("//"), rest.find("/*"))) {
            Some((Some(line), block)) if block.is_none_or(|b| line < b) => (&rest[..line], None),
            Some((_, Some(block))) => (&rest[..block], Some(&rest[block + 2..])),
            _ => (rest, None),
        };
        out.push_str(text);
        let Some(after) = after else { return out };
        rest = after;
        *in_comment = true;
    }
}

/// Cuts a list at the commas that are outside braces and brackets.
pub fn split_list(list: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0, 0);
    for (at, c) in list.char_indices() {
        match c {
            '{' | '[' | '(' => depth += 1,
            '}' | ']' | ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(list[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    if !list[start..].trim().is_empty() {
        parts.push(list[start..].trim());
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_know_their_lines() {
        let text = ".version 9.0\n.entry k(\n .param .u32 p // first\n)\n{\nret; /* a\nb */ $L:\n@%p bra $L;\n\
            mov.b64 {%a,\n%b}, %c;\n}\n.section .debug_str\n{\n$a:\n.b8 1, 2\n}";
        let parts = split(text);
        assert_eq!(parts[0], (2, PtxPart::Open(".entry k(  .param .u32 p  )".into())));
        assert_eq!(parts[1], (6, PtxPart::Statement("ret".into())));
        assert_eq!(parts[2], (7, PtxPart::Label("$L".into())));
        assert_eq!(parts[3], (8, PtxPart::Statement("@%p bra $L".into())));
        assert_eq!(parts[4], (9, PtxPart::Statement("mov.b64 {%a, %b}, %c".into())));
        assert_eq!(parts[5..], [(11, PtxPart::Close)]);
        assert_eq!(split_list("{a, b}, [c+4], d"), ["{a, b}", "[c+4]", "d"]);
    }
}
