//! Operations on the memory of an emulated accelerator: who waits for them, and what a forgotten wait does.

use crate::ranks::each;
use paceline_collectives::{Group, ReduceOp};
use paceline_memory::{
    Accelerator, Allocator, Category, DType, DeviceStream, MemoryError, SimSpec, Tensor,
};

const LEN: usize = 1000;

/// Memory of a device of its own with `value` in each element, and the stream of the memory.
fn filled(spec: SimSpec, value: f32) -> (Tensor, DeviceStream) {
    let home = Accelerator::sim(spec).stream("compute").unwrap();
    let data = Allocator::on(&home).tensor(DType::F32, [LEN], Category::Gradients).unwrap();
    data.overwrite::<f32, _>(|data| data.fill(value)).unwrap();
    (data, home)
}

fn devices() -> impl Iterator<Item = SimSpec> {
    [SimSpec::DEFAULT].into_iter().chain((0..10).map(SimSpec::late))
}

#[test]
fn a_stream_waits_for_an_operation_while_the_host_goes_on() {
    for spec in devices() {
        each(Group::threads(3), |group| {
            let (data, home) = filled(spec, 1.0 + group.rank() as f32);
            let copy = data.buffer().allocator().clone();
            let copy = copy.tensor(DType::F32, [LEN], Category::Gradients).unwrap();
            let first = group.all_reduce_async(&data, ReduceOp::Sum).unwrap();
            // A second operation on the same memory needs no wait between them.
            let second = group.all_reduce_async(&data, ReduceOp::Sum).unwrap();
            // What the stream copies now lies behind both.
            home.wait(second.event());
            copy.copy_from(&data).unwrap();
            assert_eq!(*copy.to_host().unwrap().read::<f32>().unwrap(), [18.0; LEN]);
            first.wait().unwrap();
            second.wait().unwrap();
        });
    }
}

#[test]
fn a_stream_that_does_not_wait_is_told_which_wait_is_missing() {
    for spec in devices() {
        each(Group::threads(2), |group| {
            let (data, _home) = filled(spec, 1.0);
            let copy = data.buffer().allocator().clone();
            let copy = copy.tensor(DType::F32, [LEN], Category::Gradients).unwrap();
            let work = group.all_reduce_async(&data, ReduceOp::Sum).unwrap();
            let error = copy.copy_from(&data).unwrap_err();
            assert!(matches!(error, MemoryError::Unordered { .. }), "{error}");
            let words = ["the stream compute does not wait for it", "the stream to device"];
            assert!(words.iter().all(|words| error.to_string().contains(words)), "{error}");
            work.wait().unwrap();
            copy.copy_from(&data).unwrap();
            assert_eq!(*copy.to_host().unwrap().read::<f32>().unwrap(), [2.0; LEN]);
        });
    }
}
