//! Kernels: where their sources are, and the arguments of a launch.
//!
//! A kernel is stated once, in its source. A launch names it, and gives a tuple of arguments. When a kernel is first launched it is
//! compiled, and the arguments are compared with the parameters that its source states.
//!
//! ```
//! use paceline_cuda::kernel::{Arguments, In, KernelSource, NUMBERS, Out};
//!
//! static SCALE: KernelSource = KernelSource::new(
//!     "scale.cu",
//!     "template <typename S> __global__ void scale(const S* x, S* y, u32 n) {}",
//!     &[NUMBERS],
//! );
//! let kernel = SCALE.of::<f32>("scale");
//! assert_eq!(kernel.expression(), "scale<f32>");
//! kernel.check_arguments(<(In<f32>, Out<f32>, u32)>::TYPES)?;
//! assert!(kernel.check_arguments(<(In<f32>, Out<f64>, u32)>::TYPES).is_err());
//! # Ok::<(), paceline_cuda::CudaError>(())
//! ```

use std::fmt;
use std::marker::PhantomData;

use crate::{CudaError, Result};

/// The beginning of sources: the types of numbers, and conversions between them.
pub const NUMBERS: &str = include_str!("numbers.cuh");

/// A source in CUDA C++.
#[derive(Debug)]
pub struct KernelSource {
    /// The name of the file.
    pub file: &'static str,
    /// Its text.
    pub text: &'static str,
    /// Texts before it: functions that several sources use.
    pub(crate) preludes: &'static [&'static str],
}

impl KernelSource {
    /// A source.
    pub const fn new(
        file: &'static str,
        text: &'static str,
        preludes: &'static [&'static str],
    ) -> Self {
        Self { file, text, preludes }
    }

    /// The kernels that it states.
    pub fn statements(&self) -> impl Iterator<Item = KernelStatement> {
        self.preludes.iter().copied().chain([self.text]).flat_map(statements)
    }

    /// A kernel that is no template.
    pub const fn kernel(&'static self, name: &'static str) -> CardKernel {
        CardKernel { source: self, name, scalar: "", wide: "", constants: "" }
    }

    /// The kernel for numbers of a type, which is the first parameter of the template `name`.
    pub const fn of<S: Scalar>(&'static self, name: &'static str) -> CardKernel {
        self.with::<S>(name, "")
    }

    /// The same with the constants that the template has after the type, such as `"2, false"`.
    pub const fn with<S: Scalar>(
        &'static self,
        name: &'static str,
        constants: &'static str,
    ) -> CardKernel {
        CardKernel {
            source: self,
            name,
            scalar: S::NAME,
            wide: <S::Wide as Scalar>::NAME,
            constants,
        }
    }
}

/// A kernel of a source.
#[derive(Clone, Copy)]
pub struct CardKernel {
    pub(crate) source: &'static KernelSource,
    name: &'static str,
    /// The type of numbers that it is made for, and the one in which it computes; empty if it is no template.
    scalar: &'static str,
    wide: &'static str,
    constants: &'static str,
}

/// Its name for other parts of this crate: the address of its source, and the name in it.
pub(crate) type KernelId = (usize, [&'static str; 3]);

impl CardKernel {
    /// The kernel as its source would call it, such as `scale<f32, 2>`.
    pub fn expression(&self) -> String {
        let Self { name, scalar, constants, .. } = self;
        match (scalar.is_empty(), constants.is_empty()) {
            (true, _) => (*name).to_owned(),
            (_, true) => format!("{name}<{scalar}>"),
            _ => format!("{name}<{scalar}, {constants}>"),
        }
    }

    pub(crate) fn id(&self) -> KernelId {
        (&raw const *self.source as usize, [self.name, self.scalar, self.constants])
    }

    /// Compares arguments with the parameters that the source states: their number, types, and whether memory is written.
    /// Structs are compared by nothing but their place. Errors with both lists.
    pub fn check_arguments(&self, given: &[ArgumentType]) -> Result<()> {
        let stated = self.parameters();
        let fits = |(stated, given): (&String, &ArgumentType)| match (given, stated.as_str()) {
            (ArgumentType::Record(_), stated) => {
                stated.starts_with(char::is_uppercase) && !stated.ends_with('*')
            }
            // The elements are of a type that another argument says.
            (ArgumentType::In(_), "const void*") | (ArgumentType::Out(_), "void*") => true,
            _ => given.to_string() == *stated,
        };
        if stated.len() == given.len() && stated.iter().zip(given).all(fits) {
            return Ok(());
        }
        let given = given.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        Err(CudaError::Arguments { kernel: self.expression(), stated: stated.join(", "), given })
    }

    /// The types of the parameters that its source states.
    fn parameters(&self) -> Vec<String> {
        let statement = self.source.statements().find(|of| of.name == self.name);
        let parameters = statement.map_or("", |of| of.parameters).split(',');
        parameters.filter(|of| !of.trim().is_empty()).map(|of| self.type_of(of)).collect()
    }

    /// The type of a parameter, with types of numbers in place of the template's names for them.
    fn type_of(&self, parameter: &str) -> String {
        let words = parameter.split_whitespace();
        let mut words: Vec<_> =
            words.filter(|of| !["__restrict__", "typename"].contains(of)).collect();
        words.pop();
        // TF32 lies in memory as f32.
        let scalar = self.scalar.trim_start_matches('t');
        let named = |word: &str| match word.trim_end_matches('*') {
            "S" | "H" => word.replace(['S', 'H'], scalar),
            "R" | "Real" => word.replace("Real", "R").replace('R', self.wide),
            _ => word.to_owned(),
        };
        words.into_iter().map(named).collect::<Vec<_>>().join(" ")
    }
}

/// A kernel as a source states it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelStatement {
    /// Its name.
    pub name: &'static str,
    /// The text between `template <` and `>`; empty if it is no template.
    pub template: &'static str,
    /// The text between its parentheses.
    parameters: &'static str,
}

/// The kernels that a text states.
fn statements(text: &'static str) -> impl Iterator<Item = KernelStatement> {
    text.match_indices("__global__").filter_map(move |(at, _)| {
        let (before, after) = (text[..at].trim_end(), &text[at..]);
        let template = before.strip_suffix('>').and_then(|of| of.rsplit_once("template <"));
        let head = &after[..after.find('{')?];
        // Other parentheses are those of bounds, which come first.
        let (named, parameters) = head.rsplit_once('(')?;
        let parameters = parameters.trim_end().strip_suffix(')')?;
        let name = named.split_whitespace().last()?;
        Some(KernelStatement { name, template: template.map_or("", |of| of.1), parameters })
    })
}

/// The type of an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArgumentType {
    /// The address of elements that a kernel reads.
    In(&'static str),
    /// The address of elements that it writes.
    Out(&'static str),
    /// A number.
    Number(&'static str),
    /// A struct of so many bytes.
    Record(usize),
}

impl fmt::Display for ArgumentType {
    /// As a source states it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ArgumentType::In(of) => write!(f, "const {of}*"),
            ArgumentType::Out(of) => write!(f, "{of}*"),
            ArgumentType::Number(of) => f.write_str(of),
            ArgumentType::Record(bytes) => write!(f, "a struct of {bytes} bytes"),
        }
    }
}

impl ArgumentType {
    pub(crate) fn num_words(self) -> usize {
        match self {
            ArgumentType::Record(bytes) => bytes.div_ceil(size_of::<u64>()),
            _ => 1,
        }
    }
}

/// A value that a kernel gets.
pub trait Argument {
    /// Its type.
    const TYPE: ArgumentType;

    /// Appends its bytes, in as many words as they need.
    fn push_to(self, words: &mut Vec<u64>);
}

/// The arguments of a launch: a tuple of them.
pub trait Arguments {
    /// Their types.
    const TYPES: &'static [ArgumentType];

    /// The bytes of all, each from a word on.
    fn words(self) -> Vec<u64>;
}

macro_rules! arguments {
    ($($name:ident)*) => {
        impl<$($name: Argument),*> Arguments for ($($name,)*) {
            const TYPES: &'static [ArgumentType] = &[$($name::TYPE),*];
            #[allow(non_snake_case)]
            fn words(self) -> Vec<u64> {
                let ($($name,)*) = self;
                let mut words = Vec::with_capacity(16);
                $($name.push_to(&mut words);)*
                words
            }
        }
    };
}
arguments!(A B);
arguments!(A B C);
arguments!(A B C D);
arguments!(A B C D E);
arguments!(A B C D E F);
arguments!(A B C D E F G);
arguments!(A B C D E F G H);

/// A struct that a kernel gets by value.
///
/// # Safety
///
/// It is laid out as in C, and each of its bytes belongs to a field.
pub unsafe trait Record: Copy {}

impl<R: Record> Argument for R {
    const TYPE: ArgumentType = ArgumentType::Record(size_of::<R>());
    fn push_to(self, words: &mut Vec<u64>) {
        let first = words.len();
        words.resize(first + Self::TYPE.num_words(), 0);
        let to = words[first..].as_mut_ptr().cast();
        // SAFETY: all bytes of a record are initialized, and the words have room for them.
        unsafe { std::ptr::copy_nonoverlapping((&raw const self).cast::<u8>(), to, size_of::<R>()) }
    }
}

/// A number, which kernels get by itself or in an array.
///
/// # Safety
///
/// Each byte belongs to its value.
pub unsafe trait Value: Argument + Copy {}

// SAFETY: numbers that lie one after the other, without gaps.
unsafe impl<T: Value, const N: usize> Record for [T; N] {}

/// A number type that kernels are made for.
pub trait Scalar: Copy {
    /// The end of the names of its kernels.
    const NAME: &'static str;
    /// The type in which kernels compute with it.
    type Wide: Scalar + Value;
}

/// An f32 that kernels multiply on tensor cores, which take 10 bits of its mantissa.
#[derive(Clone, Copy, Debug)]
pub struct Tf32(pub f32);

/// The type in which kernels compute with numbers of a type.
pub type Wide<S> = <S as Scalar>::Wide;

macro_rules! scalars {
    ($($ty:ty, $name:literal, $wide:ty;)*) => {$(
        impl Scalar for $ty {
            const NAME: &'static str = $name;
            type Wide = $wide;
        }
    )*};
}
scalars! {
    f32, "f32", f32;
    f64, "f64", f64;
    Tf32, "tf32", f32;
    half::f16, "f16", f32;
    half::bf16, "bf16", f32;
    u8, "u8", i32;
    u32, "u32", u32;
    i32, "i32", i32;
    i64, "i64", i64;
}

/// The address of elements that a kernel reads.
#[derive(Debug)]
#[repr(transparent)]
pub struct In<T>(pub u64, pub PhantomData<T>);

/// The address of elements that a kernel writes.
#[derive(Debug)]
#[repr(transparent)]
pub struct Out<T>(pub u64, pub PhantomData<T>);

macro_rules! addresses {
    ($($name:ident)*) => {$(
        impl<T> Clone for $name<T> {
            fn clone(&self) -> Self {
                *self
            }
        }
        impl<T> Copy for $name<T> {}
        impl<T: Scalar> Argument for $name<T> {
            const TYPE: ArgumentType = ArgumentType::$name(T::NAME);
            fn push_to(self, words: &mut Vec<u64>) {
                words.push(self.0);
            }
        }
    )*};
}
addresses!(In Out);

/// No elements: the kernel gets a null pointer.
impl<T> In<T> {
    /// Stands for an operand that is left out.
    pub const NONE: Self = Self(0, PhantomData);
}

impl<T> Out<T> {
    /// Stands for an operand that is left out.
    pub const NONE: Self = Self(0, PhantomData);

    /// The same elements, for reading.
    pub fn as_in(self) -> In<T> {
        In(self.0, PhantomData)
    }
}

macro_rules! numbers {
    ($($ty:ident, $value:ident => $bits:expr;)*) => {$(
        impl Argument for $ty {
            const TYPE: ArgumentType = ArgumentType::Number(stringify!($ty));
            fn push_to(self, words: &mut Vec<u64>) {
                let $value = self;
                words.push($bits);
            }
        }
        // SAFETY: numbers have no padding.
        unsafe impl Value for $ty {}
    )*};
}
numbers! {
    u64, x => x;
    i64, x => x as u64;
    u32, x => u64::from(x);
    i32, x => u64::from(x as u32);
    f32, x => u64::from(x.to_bits());
    f64, x => x.to_bits();
}

/// How many threads run a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks, by axis.
    pub blocks: [u32; 3],
    /// Threads of a block, by axis.
    pub threads: [u32; 3],
    /// Shared memory of a block in bytes, without the memory that the kernel states.
    pub shared_bytes: u32,
}

impl Grid {
    /// The threads of a block, unless a kernel says otherwise.
    pub const BLOCK: u32 = 256;

    /// A thread for each of `count` elements, in blocks of [`Grid::BLOCK`]; fewer elements have a block of whole warps.
    pub fn elements(count: usize) -> Self {
        let blocks = count.div_ceil(Self::BLOCK as usize).min(u32::MAX as usize / 2) as u32;
        let threads = count.clamp(1, Self::BLOCK as usize).next_multiple_of(32);
        Self::blocks(blocks, threads as u32)
    }

    /// A thread for each four of `count` elements, for kernels that use `at_places`.
    pub fn fours(count: usize) -> Self {
        let threads = count.div_ceil(4).clamp(1, Self::BLOCK as usize).next_multiple_of(32);
        let blocks = count.div_ceil(4 * threads).min(u32::MAX as usize / 2) as u32;
        Self::blocks(blocks, threads as u32)
    }

    /// Blocks along one axis.
    pub fn blocks(blocks: u32, threads: u32) -> Self {
        Self { blocks: [blocks, 1, 1], threads: [threads, 1, 1], shared_bytes: 0 }
    }

    /// The same with shared memory.
    pub fn with_shared(self, bytes: usize) -> Self {
        Self { shared_bytes: bytes as u32, ..self }
    }
}
