//! The choice of an algorithm of the library.
//!
//! Input: a product, and the library's description of it. Output: an algorithm. See the rule in [`super`].

use super::{
    ALIGNMENTS, Factor, FoundAlgorithm, MOST_WORKSPACE, Matmul, MatmulKey, MatmulPlan, MatmulSizes,
    Matmuls, MatrixType, NOT_SUPPORTED, OwnedHandle, WORKSPACE_BYTES, check,
};
use crate::{CudaError, Event, Result, Stream};

/// The most algorithms that are tried, and how often each.
const MOST_NAMED: usize = 8;
const TIMES: usize = 4;
/// The operations of a product that is large enough to try.
const WORTH_TRYING: f64 = 1e9;

impl Matmuls {
    /// The algorithm for a product: the fastest of those that the library names and that have the bits of the first.
    ///
    /// # Safety
    ///
    /// As for [`Stream::multiply`].
    pub(super) unsafe fn choose(
        &self,
        plan: &MatmulPlan,
        matmul: &Matmul,
        key: &MatmulKey,
        stream: &Stream,
    ) -> Result<[u64; 8]> {
        let found = self.named(plan, key)?;
        let first = found[0].algorithm;
        if matmul.operations() < WORTH_TRYING || found.len() == 1 || stream.is_capturing() {
            return Ok(first);
        }
        // SAFETY: the caller's.
        match unsafe { self.try_all(plan, matmul, &found, stream) } {
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

    /// The algorithms that the library names for a product, at least one, best first.
    fn named(&self, plan: &MatmulPlan, key: &MatmulKey) -> Result<Vec<FoundAlgorithm>> {
        let library = self.library;
        let (mut found, mut count) = ([FoundAlgorithm::default(); MOST_NAMED], 0);
        let destroy = library.cublasLtMatmulPreferenceDestroy;
        let preference = OwnedHandle::new("cublasLtMatmulPreferenceCreate", destroy, |handle| {
            // SAFETY: the address is that of a handle.
            unsafe { (library.cublasLtMatmulPreferenceCreate)(handle) }
        })?;
        let (function, set) =
            ("cublasLtMatmulPreferenceSetAttribute", library.cublasLtMatmulPreferenceSetAttribute);
        // SAFETY: the attributes have these types. All handles are alive, and the lists have the stated lengths.
        unsafe {
            preference.set(function, set, MOST_WORKSPACE, WORKSPACE_BYTES)?;
            // By default the library assumes 256 bytes. Its a is our b, and its d our c.
            let [a, b, c] = key.alignments.map(|power| 1u32 << power);
            for (attribute, bytes) in ALIGNMENTS.into_iter().zip([b, a, c, c]) {
                preference.set(function, set, attribute, bytes)?;
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
        let usable: Vec<FoundAlgorithm> =
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
        plan: &MatmulPlan,
        matmul: &Matmul,
        found: &[FoundAlgorithm],
        stream: &Stream,
    ) -> Result<Vec<Option<u64>>> {
        let card = stream.card();
        let bytes = matmul.result_bytes();
        let trial = Matmul {
            c: Factor { address: card.allocate(bytes)?, ..matmul.c },
            added: None,
            ..*matmul
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
            // SAFETY: as above. Elements that an algorithm does not write are the same for all.
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
            // The library may name an algorithm that it then refuses.
            (Err(_), Some(_)) => Ok(None),
        });
        let times = times.collect();
        // SAFETY: the stream is idle, or has failed.
        unsafe { card.free(trial.c.address) };
        times
    }
}

impl Matmul {
    fn operations(&self) -> f64 {
        let MatmulSizes { rows, inner, columns, batch } = self.sizes;
        2.0 * [rows, inner, columns, batch].map(|size| size as f64).iter().product::<f64>()
    }

    /// The bytes of the result, from its first element to its last.
    fn result_bytes(&self) -> usize {
        let (MatmulSizes { rows, columns, batch, .. }, Factor { stride, batch_stride, .. }) =
            (self.sizes, self.c);
        let last = (batch - 1) * batch_stride + (rows - 1) * stride;
        let bytes = match self.result {
            MatrixType::F64 => 8,
            MatrixType::F32 | MatrixType::Tf32 => 4,
            MatrixType::Bf16 | MatrixType::F16 => 2,
        };
        (last + columns) * bytes
    }
}
