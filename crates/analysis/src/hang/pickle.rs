//! Pickles of plain values: dictionaries, lists, tuples, texts, numbers, `True`, `False` and `None`.
//!
//! Bytes of protocol 2 to 5 go in, or JSON. PlainValues come out, in one list that names its members by number, so
//! shared and recursive ones cost nothing. Nothing in a pickle is ever run: whatever names a function or a class is refused.
//! Format: Python's `pickletools`.

use std::collections::HashMap;

/// The number of a value in [`PlainValues`].
pub(crate) type Id = usize;

#[derive(Debug)]
enum Value {
    /// `None`, or a fraction, which nobody asks for.
    None,
    Bool(bool),
    Int(i64),
    Text(String),
    /// A list or a tuple.
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
}

/// All values of a file.
#[derive(Debug, Default)]
pub(crate) struct PlainValues {
    all: Vec<Value>,
}

impl PlainValues {
    /// Reads a pickle of at most so many values, with those that wait for others, or JSON if the file begins with a brace. Returns
    /// the outermost value too.
    pub(crate) fn parse(bytes: &[u8], most: usize) -> Result<(Self, Id), String> {
        if bytes.first() == Some(&b'{') {
            let json = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
            let mut values = Self::default();
            let root = values.add_json(json);
            return Ok((values, root));
        }
        let mut reader = Reader { bytes, most, ..Reader::default() };
        let root = reader.run().map_err(|fault| format!("byte {}: {fault}", reader.at))?;
        Ok((reader.values, root))
    }

    fn add(&mut self, value: Value) -> Id {
        self.all.push(value);
        self.all.len() - 1
    }

    fn add_json(&mut self, json: serde_json::Value) -> Id {
        let value = match json {
            serde_json::Value::Null => Value::None,
            serde_json::Value::Bool(of) => Value::Bool(of),
            serde_json::Value::Number(of) => of.as_i64().map_or(Value::None, Value::Int),
            serde_json::Value::String(of) => Value::Text(of),
            serde_json::Value::Array(of) => {
                Value::List(of.into_iter().map(|of| self.add_json(of)).collect())
            }
            serde_json::Value::Object(of) => {
                let pair = |(key, of)| (self.add(Value::Text(key)), self.add_json(of));
                Value::Dict(of.into_iter().map(pair).collect())
            }
        };
        self.add(value)
    }

    pub(crate) fn text(&self, of: Id) -> Option<&str> {
        if let Value::Text(text) = &self.all[of] { Some(text) } else { None }
    }

    /// An integer. In JSON some are texts.
    pub(crate) fn int(&self, of: Id) -> Option<i64> {
        match &self.all[of] {
            Value::Int(int) => Some(*int),
            Value::Text(text) => text.parse().ok(),
            _ => None,
        }
    }

    pub(crate) fn bool(&self, of: Id) -> Option<bool> {
        if let Value::Bool(of) = self.all[of] { Some(of) } else { None }
    }

    /// The members of a list or tuple.
    pub(crate) fn list(&self, of: Id) -> &[Id] {
        if let Value::List(list) = &self.all[of] { list } else { &[] }
    }

    /// The entries of a dictionary whose keys are texts.
    pub(crate) fn pairs(&self, of: Id) -> impl Iterator<Item = (&str, Id)> {
        let pairs = if let Value::Dict(pairs) = &self.all[of] { pairs.as_slice() } else { &[] };
        pairs.iter().filter_map(|(key, of)| Some((self.text(*key)?, *of)))
    }

    pub(crate) fn get(&self, of: Id, key: &str) -> Option<Id> {
        self.pairs(of).find_map(|(name, of)| (name == key).then_some(of))
    }
}

/// The machine that a pickle is written for, without its dangerous half.
#[derive(Default)]
struct Reader<'a> {
    bytes: &'a [u8],
    most: usize,
    at: usize,
    values: PlainValues,
    stack: Vec<Id>,
    /// Lengths of the stack.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let bytes = self.bytes[self.at..].first_chunk::<N>().ok_or("the file is cut off")?;
        self.at += N;
        Ok(*bytes)
    }

    fn text(&mut self, len: usize) -> Result<Value, String> {
        let bytes = self.bytes[self.at..].get(..len).ok_or("the file is cut off")?;
        self.at += len;
        Ok(Value::Text(String::from_utf8_lossy(bytes).into_owned()))
    }

    /// An integer of up to eight bytes, the lowest first.
    fn long(&mut self) -> Result<Value, String> {
        let [len] = self.take()?;
        let bytes = self.bytes[self.at..].get(..len.into()).ok_or("the file is cut off")?;
        self.at += usize::from(len);
        let sign = if bytes.last().is_some_and(|last| *last > 127) { u8::MAX } else { 0 };
        let mut whole = [sign; 8];
        let place = whole.get_mut(..bytes.len()).ok_or("an integer has more than 64 bits")?;
        place.copy_from_slice(bytes);
        Ok(Value::Int(i64::from_le_bytes(whole)))
    }

    fn pop(&mut self) -> Result<Id, String> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let value = if self.stack.len() > floor { self.stack.pop() } else { None };
        value.ok_or_else(|| "a value is missing".to_owned())
    }

    /// The values since the last mark.
    fn since_mark(&mut self) -> Result<Vec<Id>, String> {
        let mark = self.marks.pop().ok_or("a mark is missing")?;
        Ok(self.stack.split_off(mark))
    }

    fn tuple(&mut self, len: usize) -> Result<Value, String> {
        let mut members = (0..len).map(|_| self.pop()).collect::<Result<Vec<_>, _>>()?;
        members.reverse();
        Ok(Value::List(members))
    }

    fn append(&mut self, added: Vec<Id>) -> Result<(), String> {
        let list = self.pop()?;
        self.stack.push(list);
        let Value::List(members) = &mut self.values.all[list] else {
            return Err("members are added to a value that is no list".to_owned());
        };
        members.extend(added);
        Ok(())
    }

    fn set_items(&mut self, added: &[Id]) -> Result<(), String> {
        let dict = self.pop()?;
        self.stack.push(dict);
        let (Value::Dict(pairs), (added, [])) =
            (&mut self.values.all[dict], added.as_chunks::<2>())
        else {
            return Err("entries are added to a value that is no dictionary".to_owned());
        };
        pairs.extend(added.iter().map(|[key, of]| (*key, *of)));
        Ok(())
    }

    fn put(&mut self, number: u32) -> Result<(), String> {
        let value = *self.stack.last().ok_or("a value is missing")?;
        self.memo.insert(number, value);
        Ok(())
    }

    fn recall(&mut self, number: u32) -> Result<(), String> {
        let value = self.memo.get(&number).ok_or("a value is used before it is there")?;
        self.stack.push(*value);
        Ok(())
    }

    /// Carries out all instructions. Returns the last value.
    fn run(&mut self) -> Result<Id, String> {
        loop {
            let [instruction] = self.take()?;
            if self.values.all.len() + self.stack.len() + self.marks.len() + self.memo.len()
                > self.most
            {
                return Err(format!("it has more than {} values", self.most));
            }
            let value = match instruction {
                0x80 => match self.take()? {
                    [2..=5] => continue,
                    [other] => {
                        return Err(format!("a pickle of protocol {other}, and not of 2 to 5"));
                    }
                },
                b'.' => return self.pop(),
                b'N' => Value::None,
                0x88 => Value::Bool(true),
                0x89 => Value::Bool(false),
                b'J' => Value::Int(i32::from_le_bytes(self.take()?).into()),
                b'K' => Value::Int(u8::from_le_bytes(self.take()?).into()),
                b'M' => Value::Int(u16::from_le_bytes(self.take()?).into()),
                0x8a => self.long()?,
                b'G' => self.take::<8>().map(|_| Value::None)?,
                b'X' => {
                    let len = u32::from_le_bytes(self.take()?);
                    self.text(len as usize)?
                }
                0x8c => {
                    let [len] = self.take()?;
                    self.text(len.into())?
                }
                b']' | b')' => Value::List(Vec::new()),
                b'}' => Value::Dict(Vec::new()),
                b't' => Value::List(self.since_mark()?),
                0x85..=0x87 => self.tuple(usize::from(instruction - 0x84))?,
                other => {
                    self.move_values(other)?;
                    continue;
                }
            };
            let id = self.values.add(value);
            self.stack.push(id);
        }
    }

    /// Carries out an instruction that makes no value.
    fn move_values(&mut self, instruction: u8) -> Result<(), String> {
        match instruction {
            b'(' => self.marks.push(self.stack.len()),
            // A frame only says how many bytes follow.
            0x95 => self.take::<8>().map(|_| ())?,
            0x94 => self.put(self.memo.len() as u32)?,
            b'q' => {
                let number = u8::from_le_bytes(self.take()?).into();
                self.put(number)?;
            }
            b'r' => {
                let number = u32::from_le_bytes(self.take()?);
                self.put(number)?;
            }
            b'h' => {
                let number = u8::from_le_bytes(self.take()?).into();
                self.recall(number)?;
            }
            b'j' => {
                let number = u32::from_le_bytes(self.take()?);
                self.recall(number)?;
            }
            b'a' => {
                let added = self.pop()?;
                self.append(vec![added])?;
            }
            b'e' => {
                let added = self.since_mark()?;
                self.append(added)?;
            }
            b's' => {
                let of = self.pop()?;
                let key = self.pop()?;
                self.set_items(&[key, of])?;
            }
            b'u' => {
                let added = self.since_mark()?;
                self.set_items(&added)?;
            }
            b'c' | b'R' | b'o' | b'i' | b'b' | 0x81 | 0x82..=0x84 | b'P' | b'Q' => {
                return Err("the pickle names code to run, which is never done".to_owned());
            }
            other => {
                return Err(format!(
                    "instruction {other:#04x} does not belong in a pickle of plain values"
                ));
            }
        }
        Ok(())
    }
}
