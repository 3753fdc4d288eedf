//! The pull parser reads the same, with the same errors at the same places, wherever its window ends.

use std::io::Read;

use paceline_analysis::json::{JsonError, Pull, Value, lossy};

/// Numbers that look random and are the same in each run.
struct Chance(u64);

impl Chance {
    /// A number below `limit`.
    fn below(&mut self, limit: usize) -> usize {
        // The generator SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits ^ (bits >> 31)) % limit as u64) as usize
    }

    fn of<'a>(&mut self, all: &[&'a str]) -> &'a str {
        all[self.below(all.len())]
    }
}

const BLANKS: [&str; 5] = ["", "", " ", "\n  ", "\r\n\t          "];

/// Scalars, some of which are wrong.
const SCALARS: [&str; 40] = [
    "0",
    "-7",
    "12",
    "1234567",
    "12345678",
    "4399414808115.986",
    "-0.5e+3",
    "1e5",
    "123456789012345678901",
    "true",
    "false",
    "null",
    "NaN",
    "Infinity",
    "-Infinity",
    "\"\"",
    "\"a\"",
    "\"name of a kernel<float, 4>\"",
    "\"\\n\\\"\\\\ \\u0041\\ud834\\udd1e\"",
    "\"{[,:]}\"",
    "\"\\\\\"",
    "\"\u{e9}\u{4e2d}\"",
    "\"\\ud834\\ud834\\u0041\"",
    "1234567890.1234567890",
    "1.",
    "-",
    "1e",
    "12x",
    "1.2.3",
    "-I",
    "truex",
    "nul",
    "true-",
    "\"\\x\"",
    "\"\\u12\"",
    "\\\"a\"",
    "1\"a\"",
    "\"a\"b",
    "\"\\ud834\\uzzzz\"",
    "1-2",
];

/// Random JSON of which the last scalars may be wrong, and which may be cut off or have a byte changed.
fn random_json(chance: &mut Chance) -> Vec<u8> {
    let mut json = String::new();
    let right = [24, SCALARS.len()][chance.below(2)];
    value(chance, &mut json, 4, right);
    let mut bytes = json.into_bytes();
    if chance.below(3) == 0 {
        bytes.truncate(chance.below(bytes.len() + 1));
    }
    if chance.below(3) == 0 && !bytes.is_empty() {
        let at = chance.below(bytes.len());
        bytes[at] = b"\"\\{}[],: \n1ax\x00\xff"[chance.below(15)];
    }
    bytes
}

fn value(chance: &mut Chance, out: &mut String, depth: usize, right: usize) {
    out.push_str(chance.of(&BLANKS));
    let is_object = match chance.below(5) {
        _ if depth == 0 => None,
        0 | 1 => Some(true),
        2 => Some(false),
        _ => None,
    };
    let Some(is_object) = is_object else {
        let right = 1 + chance.below(right);
        out.push_str(chance.of(&SCALARS[..right]));
        return out.push_str(chance.of(&BLANKS));
    };
    out.push(if is_object { '{' } else { '[' });
    for at in 0..chance.below(6) {
        if at > 0 {
            out.push(',');
        }
        if is_object {
            out.push_str(chance.of(&BLANKS));
            out.push_str(chance.of(&[
                "\"a\"",
                "\"name\"",
                "\"\\u0061\"",
                "\"External id\"",
                "\"\"",
            ]));
            out.push_str(chance.of(&["", "", " "]));
            out.push(':');
        }
        value(chance, out, depth - 1, right);
    }
    out.push(if is_object { '}' } else { ']' });
    out.push_str(chance.of(&BLANKS));
}

/// Reads one value in a way that `chance` chooses, and notes what comes and where.
fn walk<R: Read>(
    pull: &mut Pull<R>,
    chance: &mut Chance,
    seen: &mut Vec<String>,
) -> Result<(), JsonError> {
    match chance.below(4) {
        0 => pull.skip()?,
        1 => seen.push(format!("{:?}", pull.value()?)),
        _ if pull.at_object()? => {
            pull.begin_object()?;
            while let Some(key) = pull.next_key()? {
                seen.push(lossy(key).into_owned());
                seen.push(pull.offset().to_string());
                walk(pull, chance, seen)?;
            }
        }
        _ if pull.at_array()? => {
            pull.begin_array()?;
            while pull.next_item()? {
                walk(pull, chance, seen)?;
            }
        }
        _ => seen.push(match pull.value()? {
            Value::Str(text) => format!("string {}", lossy(text)),
            Value::Num(text) => format!("number {}", lossy(text)),
            other => format!("{other:?}"),
        }),
    }
    seen.push(pull.offset().to_string());
    Ok(())
}

/// What comes out of `json` by the walk number `seed`, and the error at its end.
fn outcome(json: &[u8], window: usize, seed: u64) -> Vec<String> {
    let mut pull = Pull::with_window(json, window);
    let mut seen = Vec::new();
    let end = walk(&mut pull, &mut Chance(seed), &mut seen).and_then(|()| pull.end());
    seen.push(format!("{end:?}"));
    seen
}

#[test]
fn windows_of_any_size_give_the_same() {
    let mut chance = Chance(1);
    let (mut right, mut wrong) = (0, 0);
    for round in 0..4000 {
        let json = random_json(&mut chance);
        let whole = outcome(&json, 1 << 16, round);
        *if whole.last().is_some_and(|end| end == "Ok(())") { &mut right } else { &mut wrong } += 1;
        for window in [1, 2, 3, 7, 63, 64, 65, 100] {
            let pieces = outcome(&json, window, round);
            assert_eq!(pieces, whole, "a window of {window} on {:?}", lossy(&json));
        }
    }
    assert!(
        right > 500 && wrong > 500,
        "{right} right and {wrong} wrong ones test too little of one kind"
    );
}
