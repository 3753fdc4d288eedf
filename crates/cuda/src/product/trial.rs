//! Which of the library's algorithms a product gets.
//!
//! Input: a product, and what the library has been told of it. Output: an algorithm. See the rule in [`super`].

use super::{
    ALIGNMENTS, Factor, Found, MOST_WORKSPACE, NOT_SUPPORTED, Number, Own, Plan, Product, Products,
    Shape, WORKSPACE_BYTES, check,
};
use crate::{CudaError, Event, Result, Stream};

/// The most algorithms that are tried, and how often each.
const MOST_NAMED: usize = 8;
const TIMES: usize = 4;
/// The operations of a product that is large enough to try.
const WORTH_TRYING: f64 = 1e9;

impl Products {
    /// The algorithm for a shape: of those that the library names and that have the bits of the first, the fastest.
    ///
    /// # Safety
    ///
    /// As for [`Stream::multiply`].
    pub(super) unsafe fn choose(
        &self,
        plan: &Plan,
        product: &Product,
        shape: &Shape,
        stream: &Stream,
    ) -> Result<[u64; 8]> {
        let found = self.named(plan, shape)?;
        let first = found[0].algorithm;
        if product.operations() < WORTH_TRYING || found.len() == 1 || stream.is_capturing() {
            return Ok(first);
        }
        // SAFETY: the caller's.
        match unsafe { self.try_all(plan, product, &found, stream) } {
            Ok(times) => {
                let same = found.iter().zip(times).filter(|(_, ns)| ns.is_some());
                let fastest = same.min_by_key(|(_, ns)| *ns);
                Ok(fastest.map_or(first, |(found, _)| found.algorithm))
            }
            // There is no memory for a second result.
            Err(CudaError::OutOfMemory { .. }) => Ok(first),
            Err(error) => Err(error),
        }
    }

    /// The algorithms for a shape that the library names, best first, of which there is at least one.
    fn named(&self, plan: &Plan, shape: &Shape) -> Result<Vec<Found>> {
        let library = self.library;
        let mut preference = std::ptr::null_mut();
        let empty = Found {
            algorithm: [0; 8],
            workspace_bytes: 0,
            status: 0,
            waves: 0.0,
            reserved: [0; 4],
        };
        let (mut found, mut count) = ([empty; MOST_NAMED], 0);
        // SAFETY: all handles are alive, and the addresses are those of variables of the right types and sizes.
        unsafe {
            let status = (library.cublasLtMatmulPreferenceCreate)(&mut preference);
            check("cublasLtMatmulPreferenceCreate", status)?;
            let preference =
                Own { handle: preference, destroy: library.cublasLtMatmulPreferenceDestroy };
            let most = std::ptr::from_ref(&WORKSPACE_BYTES).cast();
            let set = library.cublasLtMatmulPreferenceSetAttribute;
            let status = set(preference.handle, MOST_WORKSPACE, most, size_of::<usize>());
            check("cublasLtMatmulPreferenceSetAttribute", status)?;
            // The library takes 256 bytes for granted. Its a is our b, and its d our c.
            let [a, b, c] = shape.alignments.map(|power| 1u32 << power);
            for (attribute, bytes) in ALIGNMENTS.into_iter().zip([b, a, c, c]) {
                let value = std::ptr::from_ref(&bytes).cast();
                let status = set(preference.handle, attribute, value, size_of::<u32>());
                check("cublasLtMatmulPreferenceSetAttribute", status)?;
            }
            let status = (library.cublasLtMatmulAlgoGetHeuristic)(
                self.handle,
                plan.desc.handle,
                plan.b.handle,
                plan.a.handle,
                plan.c.handle,
                plan.c.handle,
                preference.handle,
                MOST_NAMED as i32,
                found.as_mut_ptr(),
                &mut count,
            );
            check("cublasLtMatmulAlgoGetHeuristic", status)?;
        }
        let usable: Vec<Found> =
            found.into_iter().take(count as usize).filter(|found| found.status == 0).collect();
        if usable.is_empty() {
            check("cublasLtMatmulAlgoGetHeuristic", NOT_SUPPORTED).map(|()| usable)
        } else {
            Ok(usable)
        }
    }

    /// The shortest time of a product with each of these algorithms, in nanoseconds; `None` for an algorithm that gives other
    /// bits than the first. The result goes to memory of its own, and no old one is added. Blocks until the stream is idle.
    ///
    /// # Safety
    ///
    /// As for [`Stream::multiply`].
    unsafe fn try_all(
        &self,
        plan: &Plan,
        product: &Product,
        found: &[Found],
        stream: &Stream,
    ) -> Result<Vec<Option<u64>>> {
        let card = stream.card();
        let bytes = product.result_bytes();
        let trial = Product {
            c: Factor { address: card.allocate(bytes)?, ..product.c },
            keep: 0.0,
            ..*product
        };
        let run = |algorithm| {
            let time = || -> Result<u64> {
                let (begun, ended) = (Event::new(card)?, Event::new(card)?);
                stream.record(&begun)?;
                // SAFETY: the caller's; nobody else knows the memory of the result.
                unsafe { self.multiply(plan, algorithm, &trial, stream) }?;
                stream.record(&ended)?;
                ended.synchronize()?;
                ended.ns_since(&begun)
            };
            // SAFETY: as above. What an algorithm leaves out is the same for all.
            unsafe { stream.fill(trial.c.address, 0, bytes) }?;
            let times = (0..TIMES).map(|_| time()).collect::<Result<Vec<_>>>()?;
            let mut result = vec![0; bytes];
            // SAFETY: the result has this length, and the work is waited for.
            unsafe { stream.copy_to_host(trial.c.address, result.as_mut_ptr(), bytes) }?;
            stream.synchronize()?;
            Ok((times.into_iter().min().unwrap_or(u64::MAX), result))
        };
        let mut first: Option<Vec<u8>> = None;
        let times = found.iter().map(|found| match (run(&found.algorithm), &first) {
            (Ok((ns, result)), None) => {
                first = Some(result);
                Ok(Some(ns))
            }
            (Err(error), None) => Err(error),
            // Zeros are the same in every order of sums.
            (Ok((ns, result)), Some(first)) => {
                let has_first_bits = result == *first && first.iter().any(|byte| *byte != 0);
                Ok(has_first_bits.then_some(ns))
            }
            // The library may name what it then refuses.
            (Err(_), Some(_)) => Ok(None),
        });
        let times = times.collect();
        // SAFETY: the stream is idle, or has failed.
        unsafe { card.free(trial.c.address) };
        times
    }
}

impl Product {
    fn operations(&self) -> f64 {
        2.0 * [self.rows, self.inner, self.columns, self.batch]
            .into_iter()
            .map(|size| size as f64)
            .product::<f64>()
    }

    /// The bytes from the first element of the result to behind the last.
    fn result_bytes(&self) -> usize {
        let Factor { stride, batch_stride, .. } = self.c;
        let last = (self.batch - 1) * batch_stride + (self.rows - 1) * stride;
        let bytes = match self.result {
            Number::Double => 8,
            Number::Single | Number::Rounded => 4,
            Number::Brain | Number::Half => 2,
        };
        (last + self.columns) * bytes
    }
}
