//! The `args` of an event: those that the analysis uses.

use std::io::Read;

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
    pub(super) bandwidth_gb_s: Option<f64>,
    /// The name of a row, in the event that names one.
    pub(super) name: Option<String>,
    pub(super) collective: Option<Box<Collective>>,
    /// Total number of elements of the input tensors. Only for operators for which it is read.
    pub(super) input_elems: Option<u64>,
    /// Element type of the first input tensor, for the same operators.
    pub(super) input_type: Option<String>,
    /// The shape of each input, in order; empty for inputs that are not tensors. Only for products.
    pub(super) shapes: Vec<Vec<u64>>,
    /// The strides of each input, in the same way.
    pub(super) strides: Vec<Vec<u64>>,
    /// The values of the inputs that are not tensors, as written. Only for products.
    pub(super) values: Vec<String>,
    pub(super) device_type: Option<i64>,
    pub(super) allocated_bytes: Option<u64>,
    pub(super) reserved_bytes: Option<u64>,
    pub(super) delta_bytes: Option<i64>,
    /// The number in a mark.
    pub(super) id: Option<u64>,
}

/// The fields that are read from the inputs of an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Inputs {
    /// Nothing.
    Skip,
    /// The number of elements.
    Elems,
    /// Every shape with its strides, and the values.
    Shapes,
}

/// The keys that are used.
enum Key {
    Stream,
    Correlation,
    WaitStream,
    WaitRecord,
    Bytes,
    Bandwidth,
    Name,
    CollectiveName,
    InElems,
    OutElems,
    Dtype,
    GroupSize,
    Group,
    GroupRanks,
    Seq,
    Wait,
    Queue,
    InputDims,
    InputStrides,
    InputType,
    InputValues,
    DeviceType,
    TotalAllocated,
    TotalReserved,
    DeltaBytes,
    Id,
}

impl Key {
    fn of(key: &[u8]) -> Option<Self> {
        Some(match key {
            b"stream" => Self::Stream,
            b"correlation" => Self::Correlation,
            b"wait_on_stream" => Self::WaitStream,
            b"wait_on_cuda_event_record_corr_id" => Self::WaitRecord,
            b"bytes" => Self::Bytes,
            b"memory bandwidth (GB/s)" => Self::Bandwidth,
            b"name" => Self::Name,
            b"Collective name" => Self::CollectiveName,
            b"In msg nelems" => Self::InElems,
            b"Out msg nelems" => Self::OutElems,
            b"dtype" => Self::Dtype,
            b"Group size" => Self::GroupSize,
            b"Process Group Name" => Self::Group,
            b"Process Group Ranks" => Self::GroupRanks,
            b"Seq" => Self::Seq,
            b"wait (us)" => Self::Wait,
            b"queue (us)" => Self::Queue,
            b"Input Dims" => Self::InputDims,
            b"Input Strides" => Self::InputStrides,
            b"Input type" => Self::InputType,
            b"Concrete Inputs" => Self::InputValues,
            b"Device Type" => Self::DeviceType,
            b"Total Allocated" => Self::TotalAllocated,
            b"Total Reserved" => Self::TotalReserved,
            b"Bytes" => Self::DeltaBytes,
            b"id" => Self::Id,
            _ => return None,
        })
    }
}

impl Args {
    /// Reads an `args` object, and those fields of the inputs of operators that `inputs` names.
    pub(super) fn take<R: Read>(
        &mut self,
        pull: &mut Pull<R>,
        inputs: Inputs,
    ) -> Result<(), JsonError> {
        if !pull.at_object()? {
            return pull.skip();
        }
        pull.begin_object()?;
        while let Some(key) = pull.next_key()? {
            match Key::of(key) {
                Some(Key::InputDims) if inputs == Inputs::Shapes && pull.at_array()? => {
                    self.shapes = shapes(pull)?;
                }
                Some(Key::InputStrides) if inputs == Inputs::Shapes && pull.at_array()? => {
                    self.strides = shapes(pull)?;
                }
                Some(Key::InputValues) if inputs == Inputs::Shapes && pull.at_array()? => {
                    self.values = values(pull)?;
                }
                Some(Key::InputDims) if inputs == Inputs::Elems && pull.at_array()? => {
                    self.input_elems = Some(elems(pull)?.unwrap_or(0));
                }
                Some(Key::InputType) if inputs != Inputs::Skip && pull.at_array()? => {
                    self.input_type = first_type(pull)?;
                }
                Some(key) => self.set(key, pull.value()?),
                None => pull.skip()?,
            }
        }
        Ok(())
    }

    fn set(&mut self, key: Key, value: Value<'_>) {
        let bytes = value.bytes().unwrap_or_default();
        match key {
            Key::Stream => self.stream = signed(bytes),
            Key::Correlation => self.correlation = unsigned(bytes),
            Key::WaitStream => self.wait_stream = signed(bytes),
            Key::WaitRecord => self.wait_record = unsigned(bytes),
            Key::Bytes => self.bytes = unsigned(bytes),
            Key::Bandwidth => self.bandwidth_gb_s = float(bytes),
            Key::Name => self.name = value.words().map(Into::into),
            Key::DeviceType => self.device_type = signed(bytes),
            Key::TotalAllocated => self.allocated_bytes = unsigned(bytes),
            Key::TotalReserved => self.reserved_bytes = unsigned(bytes),
            Key::DeltaBytes => self.delta_bytes = signed(bytes),
            Key::Id => self.id = unsigned(bytes),
            Key::InputDims | Key::InputStrides | Key::InputType | Key::InputValues => {}
            key => {
                let words = || value.words().map(Into::into);
                // Some writers give a list of ranks as an array, which is not used.
                if value == Value::Nested || value == Value::Null {
                    return;
                }
                let collective = self.collective.get_or_insert_default();
                match key {
                    Key::CollectiveName => collective.name = words().unwrap_or_default(),
                    Key::InElems => collective.in_elems = unsigned(bytes),
                    Key::OutElems => collective.out_elems = unsigned(bytes),
                    Key::Dtype => collective.dtype = words(),
                    Key::GroupSize => collective.group_size = unsigned(bytes),
                    Key::Group => collective.group = words(),
                    Key::GroupRanks => collective.group_ranks = words(),
                    Key::Seq => collective.seq = unsigned(bytes),
                    Key::Wait => collective.wait_ns = micros_ns(bytes),
                    _ => collective.queue_ns = micros_ns(bytes),
                }
            }
        }
    }
}

/// The number of elements of all tensors in a list of shapes. The list may contain lists of shapes:
/// `[[2, 3], [[4], [5]], []]` has 15 elements. An empty list is not a tensor but an argument of another type.
/// `None` if a size is not a number, or if the result overflows.
fn elems<R: Read>(pull: &mut Pull<R>) -> Result<Option<u64>, JsonError> {
    pull.begin_array()?;
    let (mut product, mut sum) = (None, Some(0u64));
    while pull.next_item()? {
        if pull.at_array()? {
            let inner = elems(pull)?;
            sum = sum.zip(inner).and_then(|(a, b)| a.checked_add(b));
        } else {
            let size = pull.value()?.bytes().and_then(unsigned);
            let before: Option<u64> = product.unwrap_or(Some(1));
            product = Some(before.zip(size).and_then(|(a, b)| a.checked_mul(b)));
        }
    }
    Ok(product.unwrap_or(sum))
}

/// The most inputs and dimensions that are kept of a product.
const MOST: usize = 16;

/// The shape of each input, or its strides. A list of tensors counts as an input without a shape.
fn shapes<R: Read>(pull: &mut Pull<R>) -> Result<Vec<Vec<u64>>, JsonError> {
    pull.begin_array()?;
    let mut shapes = Vec::new();
    while pull.next_item()? {
        let mut shape = Vec::new();
        if pull.at_array()? {
            pull.begin_array()?;
            while pull.next_item()? {
                if pull.at_array()? {
                    pull.skip()?;
                } else if let Some(size) = pull.value()?.bytes().and_then(unsigned)
                    && shape.len() < MOST
                {
                    shape.push(size);
                }
            }
        } else {
            pull.skip()?;
        }
        if shapes.len() < MOST {
            shapes.push(shape);
        }
    }
    Ok(shapes)
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

/// The first element type in a list of types. `["TensorList", ""]` has none.
fn first_type<R: Read>(pull: &mut Pull<R>) -> Result<Option<String>, JsonError> {
    pull.begin_array()?;
    let mut found = None;
    while pull.next_item()? {
        match pull.value()? {
            Value::Str(b"" | b"TensorList" | b"ScalarList" | b"Scalar" | b"GenericList") => {}
            Value::Str(text) if found.is_none() => found = Some(lossy(text).into_owned()),
            _ => {}
        }
    }
    Ok(found)
}
