//! Kernels: where their sources are, and calls with their arguments.
//!
//! [`kernels!`](crate::kernels) states the kernels of a source once, with the types of their arguments, and makes a function
//! for each that builds a call. [`KernelSource::check`] compares that with the compiled code, so a wrong type is found by a test.

use std::marker::PhantomData;

use crate::{CudaError, Result, compiler};

/// The beginning of sources: the types of numbers, and conversions between them.
pub const NUMBERS: &str = include_str!("numbers.cuh");

/// A source in CUDA C++ and the kernels in it.
#[derive(Debug)]
pub struct KernelSource {
    /// The name of the file.
    pub file: &'static str,
    /// Its text, without [`KernelSource::preludes`].
    pub text: &'static str,
    /// Texts before it: functions that several sources use.
    pub preludes: &'static [&'static str],
    /// The kernels, by name: that of a function, or of a template with a type such as `add<f32>`.
    pub kernels: &'static [&'static str],
    /// The types of each kernel's arguments.
    pub kinds: &'static [&'static [ArgumentKind]],
}

/// The type of an argument, as far as a caller can mix it up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArgumentKind {
    /// An address or an integer of 64 bits.
    Word,
    /// An integer of 32 bits.
    Half,
    /// A number of f32.
    Single,
    /// A number of f64.
    Double,
    /// A struct of so many bytes.
    Record(usize),
}

impl ArgumentKind {
    /// The type of an argument as the text of compiled code states it.
    fn of_code(argument: &str) -> Option<Self> {
        argument.split_whitespace().find_map(|word| match word {
            ".u64" | ".b64" | ".s64" => Some(ArgumentKind::Word),
            ".u32" | ".b32" | ".s32" => Some(ArgumentKind::Half),
            ".f32" => Some(ArgumentKind::Single),
            ".f64" => Some(ArgumentKind::Double),
            ".b8" => Some(ArgumentKind::Record(argument.split(['[', ']']).nth(1)?.parse().ok()?)),
            _ => None,
        })
    }

    pub(crate) fn num_words(self) -> usize {
        match self {
            ArgumentKind::Record(bytes) => bytes.div_ceil(size_of::<u64>()),
            _ => 1,
        }
    }
}

/// A value that a kernel gets.
pub trait Argument {
    /// Its type.
    const KIND: ArgumentKind;

    /// Appends its bytes, in as many words as they need.
    fn push_to(self, words: &mut Vec<u64>);
}

/// A struct that a kernel gets by value.
///
/// # Safety
///
/// It is laid out as in C, and each of its bytes belongs to a field.
pub unsafe trait Record: Copy {}

impl<R: Record> Argument for R {
    const KIND: ArgumentKind = ArgumentKind::Record(size_of::<R>());
    fn push_to(self, words: &mut Vec<u64>) {
        let first = words.len();
        words.resize(first + Self::KIND.num_words(), 0);
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
        impl<T> Argument for $name<T> {
            const KIND: ArgumentKind = ArgumentKind::Word;
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
    ($($ty:ty, $kind:ident, $value:ident => $bits:expr;)*) => {$(
        impl Argument for $ty {
            const KIND: ArgumentKind = ArgumentKind::$kind;
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
    u64, Word, x => x;
    i64, Word, x => x as u64;
    u32, Half, x => u64::from(x);
    i32, Half, x => u64::from(x as u32);
    f32, Single, x => u64::from(x.to_bits());
    f64, Double, x => x.to_bits();
}

/// A kernel with its arguments.
#[derive(Clone, Debug)]
pub struct KernelCall<'a> {
    pub(crate) source: &'a KernelSource,
    pub(crate) kernel: &'static str,
    pub(crate) kinds: &'static [ArgumentKind],
    /// The arguments, each from a word on.
    pub(crate) words: Vec<u64>,
}

impl<'a> KernelCall<'a> {
    /// A call of the kernel `name`, or of the one for elements of type `scalar` among `names`.
    #[doc(hidden)]
    pub fn new(
        source: &'a KernelSource,
        name: &'static str,
        variants: &[(&'static str, &'static str)],
        scalar: &'static str,
        (kinds, words): (&'static [ArgumentKind], Vec<u64>),
    ) -> Result<Self> {
        let kernel = match variants {
            [] => name,
            _ => {
                let of_scalar = variants.iter().find(|(of, _)| *of == scalar);
                of_scalar.ok_or(CudaError::NoKernel { name, scalar })?.1
            }
        };
        Ok(Self { source, kernel, kinds, words })
    }
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

impl KernelSource {
    /// Compares the stated kernels with those of the text, compiled for an emulated card. Errors with the first difference.
    pub fn check(&self) -> std::result::Result<(), String> {
        let compiled = compiler::compile(self, compiler::CompileTarget::Text(80))
            .map_err(|e| e.to_string())?;
        let code = String::from_utf8_lossy(&compiled.made);
        let found: Vec<(&str, Vec<ArgumentKind>)> =
            code.split(".entry").skip(1).map(entry).collect();
        let stated = || self.kernels.iter().zip(&compiled.symbols);
        for ((name, symbol), kinds) in stated().zip(self.kinds) {
            match found.iter().find(|(of, _)| of == symbol) {
                None => return Err(format!("{} has no kernel {name}", self.file)),
                Some((_, found)) if found == kinds => {}
                Some((_, found)) => {
                    return Err(format!("{name} takes {found:?}, and {kinds:?} are stated"));
                }
            }
        }
        match found.iter().find(|(name, _)| stated().all(|(_, symbol)| symbol != name)) {
            Some((name, _)) => Err(format!("{} has a kernel {name} that is not stated", self.file)),
            None => Ok(()),
        }
    }
}

/// The name of an entry of compiled code, and the types of its arguments.
fn entry(text: &str) -> (&str, Vec<ArgumentKind>) {
    let head = text.split('{').next().unwrap_or_default();
    let (name, arguments) = head.split_once('(').unwrap_or((head, ""));
    let arguments = arguments.split(')').next().unwrap_or_default();
    (name.trim(), arguments.split(',').filter_map(ArgumentKind::of_code).collect())
}

/// States the kernels of a source, which are functions or templates. A template may have another name than the function here, and
/// more arguments after the type: `fn scale_by_2<T: f32>["scale", "2"](..)` is `scale<f32, 2>`.
///
/// ```
/// use paceline_cuda::kernel::{In, NUMBERS, Out};
///
/// paceline_cuda::kernels! {
///     SCALE = "scale.cu", "template <typename T> __global__ void scale(const T* x, T* y, unsigned n) {}", [NUMBERS];
///     /// `y = x` for the first `n` elements.
///     fn scale<T: f32>(x: In<T>, y: Out<T>, n: u32);
/// }
/// assert_eq!(SCALE.kernels, ["scale<f32>"]);
/// let call = scale::<f32>(In::NONE, Out::NONE, 3).unwrap();
/// ```
#[macro_export]
macro_rules! kernels {
    ($source:ident = $file:expr, $text:expr, [$($prelude:expr),*];
     $($(#[$about:meta])* fn $name:ident$(<$t:ident: $($scalar:ident)|+>)?$([$of:literal, $more:literal])?($($arg:ident: $ty:ty),* $(,)?);)*) => {
        /// The kernels of this file.
        pub static $source: $crate::KernelSource = $crate::KernelSource {
            file: $file,
            text: $text,
            preludes: &[$($prelude),*],
            kernels: &$crate::kernels!(@flat [] $([[$name $($of $more)?] $($($scalar)+)?])*),
            kinds: &$crate::kernels!(@kinds [] $([($($ty),*) $name $($t $($scalar)+)?])*),
        };
        $(
            $(#[$about])*
            #[allow(clippy::too_many_arguments)]
            pub fn $name$(<$t: $crate::kernel::Scalar>)?($($arg: $ty),*) -> $crate::Result<$crate::KernelCall<'static>> {
                let mut words = Vec::with_capacity(16);
                $($crate::Argument::push_to($arg, &mut words);)*
                let kinds = const { &[$(<$ty as $crate::Argument>::KIND),*] };
                let variants = &$crate::kernels!(@variants [$name $($of $more)?] $($($scalar)+)?);
                let scalar = $crate::kernels!(@scalar $($t)?);
                $crate::KernelCall::new(&$source, stringify!($name), variants, scalar, (kinds, words))
            }
        )*
    };
    (@scalar) => { "" };
    (@scalar $t:ident) => { <$t as $crate::kernel::Scalar>::NAME };
    (@flat [$($done:expr),*]) => { [$($done),*] };
    (@flat [$($done:expr),*] [[$name:ident]] $($rest:tt)*) => {
        $crate::kernels!(@flat [$($done,)* stringify!($name)] $($rest)*)
    };
    (@flat [$($done:expr),*] [$of:tt $($scalar:ident)+] $($rest:tt)*) => {
        $crate::kernels!(@flat [$($done,)* $($crate::kernels!(@name $of $scalar)),+] $($rest)*)
    };
    (@variants $of:tt $($scalar:ident)*) => { [$((stringify!($scalar), $crate::kernels!(@name $of $scalar))),*] };
    (@name [$name:ident] $scalar:ident) => { concat!(stringify!($name), "<", stringify!($scalar), ">") };
    (@name [$name:ident $of:literal $more:literal] $scalar:ident) => {
        concat!($of, "<", stringify!($scalar), ", ", $more, ">")
    };
    (@kinds [$($done:expr),*]) => { [$($done),*] };
    (@kinds [$($done:expr),*] [($($ty:ty),*) $name:ident] $($rest:tt)*) => {
        $crate::kernels!(@kinds [$($done,)* &[$(<$ty as $crate::Argument>::KIND),*] as &[$crate::ArgumentKind]] $($rest)*)
    };
    (@kinds [$($done:expr),*] [$types:tt $name:ident $t:ident $($scalar:ident)+] $($rest:tt)*) => {
        $crate::kernels!(@kinds [$($done,)* $($crate::kernels!(@of $t $scalar $types)),+] $($rest)*)
    };
    (@of $t:ident $scalar:ident ($($ty:ty),*)) => {{
        #[allow(dead_code)]
        type $t = $crate::kernel::scalar::$scalar;
        &[$(<$ty as $crate::Argument>::KIND),*] as &[$crate::ArgumentKind]
    }};
}

/// The types of elements, by the ends of kernels' names.
#[doc(hidden)]
pub mod scalar {
    #![allow(non_camel_case_types)]
    pub type f32 = core::primitive::f32;
    pub type f64 = core::primitive::f64;
    pub type tf32 = super::Tf32;
    pub type f16 = half::f16;
    pub type bf16 = half::bf16;
    pub type u8 = core::primitive::u8;
    pub type i32 = core::primitive::i32;
    pub type i64 = core::primitive::i64;
}
