//! The `args` of an event: those that the analysis uses.

use std::io::Read;

use crate::doctor::collectives::elem_bytes;
use crate::json::{JsonError, Pull, Value, float, lossy, micros_ns, signed, unsigned};
use crate::timeline::Collective;

/// The fields of `args`. A field that is missing in the file is `None`.
#[derive(Clone, Debug, Default)]
pub(super) struct Args {
    pub(super) stream: Option<i64>,
    pub(super) correlation: Option<u64>,
    /// For a wait of the device: the stream on which the awaited event was recorded, and the call that
    /// recorded it.
    pub(super) wait_stream: Option<i64>,
    pub(super) wait_record: Option<u64>,
    pub(super) bytes: Option<u64>,
    /// Only our recorder writes this.
    pub(super) flop: Option<u64>,
    pub(super) bandwidth_gb_s: Option<f64>,
    /// The name of a row, in the event that names one.
    pub(super) name: Option<String>,
    pub(super) collective: Option<Box<Collective>>,
    /// Total number of elements of the input tensors. Only for operators whose inputs are read.
    pub(super) input_elems: Option<u64>,
    /// Element type of the first input tensor, for the same operators.
    pub(super) input_type: Option<String>,
    /// The shape of each input, in order; empty for inputs that are not tensors. For the same operators.
    pub(super) shapes: Vec<Vec<u64>>,
    /// The bytes of an element of each input; 0 for types that are not known.
    pub(super) elem_bytes: Vec<u64>,
    /// The strides of each input, in the same way.
    pub(super) strides: Vec<Vec<u64>>,
    /// The values of the inputs that are not tensors, as written. For the same operators.
    pub(super) values: Vec<String>,
    pub(super) device_type: Option<i64>,
    /// For a sample of memory: by how much it changed.
    pub(super) change_bytes: Option<i64>,
    pub(super) addr: Option<u64>,
    pub(super) allocated_bytes: Option<u64>,
    pub(super) reserved_bytes: Option<u64>,
    /// The number in a mark.
    pub(super) id: Option<u64>,
    /// The place in the program from which a function of Python was called.
    pub(super) caller: Option<String>,
}

/// How the value of a key is read.
enum Key {
    /// A single value, which goes into a field.
    Value(fn(&mut Args, Value<'_>)),
    /// A single value about the collective.
    Said(fn(&mut Collective, Value<'_>)),
    /// The lists of an operator's inputs.
    Dims,
    Strides,
    Types,
    Values,
}

#[rustfmt::skip]
impl Key {
    fn of(key: &[u8]) -> Option<Self> {
        Some(match key {
            b"stream" => Self::Value(|args, of| args.stream = signed(text(of))),
            b"correlation" => Self::Value(|args, of| args.correlation = unsigned(text(of))),
            b"wait_on_stream" => Self::Value(|args, of| args.wait_stream = signed(text(of))),
            b"wait_on_cuda_event_record_corr_id" => Self::Value(|args, of| args.wait_record = unsigned(text(of))),
            b"bytes" => Self::Value(|args, of| args.bytes = unsigned(text(of))),
            b"FLOP" => Self::Value(|args, of| args.flop = unsigned(text(of))),
            b"memory bandwidth (GB/s)" => Self::Value(|args, of| args.bandwidth_gb_s = float(text(of))),
            b"name" => Self::Value(|args, of| args.name = words(of)),
            b"Device Type" => Self::Value(|args, of| args.device_type = signed(text(of))),
            b"Bytes" => Self::Value(|args, of| args.change_bytes = signed(text(of))),
            b"Addr" => Self::Value(|args, of| args.addr = unsigned(text(of))),
            b"Total Allocated" => Self::Value(|args, of| args.allocated_bytes = unsigned(text(of))),
            b"Total Reserved" => Self::Value(|args, of| args.reserved_bytes = unsigned(text(of))),
            b"CallFrom" => Self::Value(|args, of| args.caller = words(of)),
            b"id" => Self::Value(|args, of| args.id = unsigned(text(of))),
            b"In msg nelems" => Self::Said(|said, of| said.in_elems = unsigned(text(of))),
            b"Out msg nelems" => Self::Said(|said, of| said.out_elems = unsigned(text(of))),
            b"Group size" => Self::Said(|said, of| said.group_size = unsigned(text(of))),
            b"Seq" => Self::Said(|said, of| said.seq = unsigned(text(of))),
            b"wait (us)" => Self::Said(|said, of| said.wait_ns = micros_ns(text(of))),
            b"queue (us)" => Self::Said(|said, of| said.queue_ns = micros_ns(text(of))),
            b"Collective name" => Self::Said(|said, of| said.name = words(of).unwrap_or_default()),
            b"dtype" => Self::Said(|said, of| said.dtype = words(of)),
            b"Process Group Name" => Self::Said(|said, of| said.group = words(of)),
            b"Process Group Ranks" => Self::Said(|said, of| said.group_ranks = words(of)),
            b"Input Dims" => Self::Dims,
            b"Input Strides" => Self::Strides,
            b"Input type" => Self::Types,
            b"Concrete Inputs" => Self::Values,
            _ => return None,
        })
    }
}

/// A string or a number as written; empty for all else.
fn text(value: Value<'_>) -> &[u8] {
    value.bytes().unwrap_or_default()
}

/// A scalar as text.
fn words(value: Value<'_>) -> Option<String> {
    value.words().map(Into::into)
}

impl Args {
    /// Reads an `args` object, the lists of an operator's inputs only if `wants_inputs`.
    pub(super) fn take<R: Read>(
        &mut self,
        pull: &mut Pull<R>,
        wants_inputs: bool,
    ) -> Result<(), JsonError> {
        if !pull.enter_object()? {
            return Ok(());
        }
        while let Some(key) = pull.next_key()? {
            let Some(key) = Key::of(key) else {
                pull.skip()?;
                continue;
            };
            let is_list = wants_inputs && pull.at_array()?;
            match key {
                Key::Value(set) => set(self, pull.value()?),
                Key::Said(set) => match pull.value()? {
                    // Some writers give a list of ranks as an array, which is not used.
                    Value::Nested | Value::Null => {}
                    value => set(self.collective.get_or_insert_default(), value),
                },
                Key::Types if is_list => {
                    self.elem_bytes.clear();
                    self.input_type = types(pull, &mut self.elem_bytes)?;
                }
                Key::Dims if is_list => {
                    let (shapes, elems) = shapes(pull)?;
                    (self.shapes, self.input_elems) = (shapes, Some(elems.unwrap_or(0)));
                }
                Key::Strides if is_list => self.strides = shapes(pull)?.0,
                Key::Values if is_list => self.values = values(pull)?,
                _ => pull.skip()?,
            }
        }
        Ok(())
    }
}

/// The most inputs and dimensions that are kept of a product.
const MOST: usize = 16;

/// The shape of each input, or its strides, and the number of elements of all tensors. A list of tensors counts as an input without
/// a shape.
fn shapes<R: Read>(pull: &mut Pull<R>) -> Result<(Vec<Vec<u64>>, Option<u64>), JsonError> {
    pull.begin_array()?;
    let (mut shapes, mut sum) = (Vec::new(), Some(0u64));
    while pull.next_item()? {
        let mut shape = Vec::new();
        if pull.at_array()? {
            let elems = elems(pull, &mut shape)?;
            sum = sum.zip(elems).and_then(|(a, b)| a.checked_add(b));
        } else {
            pull.skip()?;
        }
        if shapes.len() < MOST {
            shapes.push(shape);
        }
    }
    Ok((shapes, sum))
}

/// The number of elements of a tensor whose shape follows, or of the tensors in a list: `[2, 3]` has 6, and `[[4], [5]]` has 9. An
/// empty list is not a tensor but an argument of another type. Sizes go to `shape`. `None` if a size is not a number, or if the
/// result overflows.
fn elems<R: Read>(pull: &mut Pull<R>, shape: &mut Vec<u64>) -> Result<Option<u64>, JsonError> {
    pull.begin_array()?;
    let (mut product, mut sum) = (None, Some(0u64));
    while pull.next_item()? {
        if pull.at_array()? {
            let inner = elems(pull, &mut Vec::new())?;
            sum = sum.zip(inner).and_then(|(a, b)| a.checked_add(b));
            continue;
        }
        let size = pull.value()?.bytes().and_then(unsigned);
        let before: Option<u64> = product.unwrap_or(Some(1));
        product = Some(before.zip(size).and_then(|(a, b)| a.checked_mul(b)));
        shape.extend(size.filter(|_| shape.len() < MOST));
    }
    Ok(product.unwrap_or(sum))
}

/// The values of the inputs that are not tensors, as words.
fn values<R: Read>(pull: &mut Pull<R>) -> Result<Vec<String>, JsonError> {
    pull.begin_array()?;
    let mut values = Vec::new();
    while pull.next_item()? {
        let words = pull.value()?.words().unwrap_or_default();
        if values.len() < MOST {
            values.push(words.chars().take(64).collect());
        }
    }
    Ok(values)
}

/// The first element type in a list of types, and the bytes of an element of each. `["TensorList", ""]` has none.
fn types<R: Read>(pull: &mut Pull<R>, sizes: &mut Vec<u64>) -> Result<Option<String>, JsonError> {
    pull.begin_array()?;
    let mut found = None;
    while pull.next_item()? {
        let value = pull.value()?;
        if sizes.len() < MOST {
            let words = value.words();
            sizes.push(words.and_then(|of| elem_bytes(&of)).unwrap_or(0));
        }
        match value {
            Value::Str(b"" | b"TensorList" | b"ScalarList" | b"Scalar" | b"GenericList") => {}
            Value::Str(text) if found.is_none() => found = Some(lossy(text).into_owned()),
            _ => {}
        }
    }
    Ok(found)
}
