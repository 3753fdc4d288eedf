//! Folders of weights in the form of Hugging Face: what is read, what is refused, and how much.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use half::{bf16, f16};
use paceline_memory::{Allocator, DType};
use paceline_model::pretrained::{NewParam, Pretrained};
use paceline_model::{Init, Layout, LayoutBuilder, ParamId, Storage};
use safetensors::tensor::{Dtype, TensorView, serialize};

/// Parameters `a.weight` (3, 5) and `b.weight` (4).
fn layout(world_size: usize) -> Layout {
    let mut builder = LayoutBuilder::new();
    let mut unit = builder.unit("a");
    unit.param("weight", [3, 5], Init::Constant(9.0));
    let mut unit = builder.unit("b");
    unit.param("weight", [4], Init::Constant(9.0));
    builder.finish(world_size)
}

/// Numbers that each of the types has.
fn numbers(len: usize) -> Vec<f32> {
    (0..len).map(|at| at as f32 / 4.0 - 1.5).collect()
}

fn bytes(dtype: Dtype, elems: &[f32]) -> Vec<u8> {
    let of = |x: &f32| match dtype {
        Dtype::F16 => f16::from_f32(*x).to_le_bytes().to_vec(),
        Dtype::BF16 => bf16::from_f32(*x).to_le_bytes().to_vec(),
        Dtype::F64 => f64::from(*x).to_le_bytes().to_vec(),
        _ => x.to_le_bytes().to_vec(),
    };
    elems.iter().flat_map(of).collect()
}

/// Writes a file of tensors: name, type, shape.
fn write(path: &Path, tensors: &[(&str, Dtype, &[usize])]) {
    let data: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, dtype, shape)| bytes(*dtype, &numbers(shape.iter().product())))
        .collect();
    let views: HashMap<String, TensorView> = tensors
        .iter()
        .zip(&data)
        .map(|((name, dtype, shape), data)| {
            ((*name).to_owned(), TensorView::new(*dtype, shape.to_vec(), data).unwrap())
        })
        .collect();
    fs::write(path, serialize(views, None).unwrap()).unwrap();
}

const A: (&str, Dtype, &[usize]) = ("a.weight", Dtype::F32, &[3, 5]);
const B: (&str, Dtype, &[usize]) = ("b.weight", Dtype::F32, &[4]);

fn single(tensors: &[(&str, Dtype, &[usize])]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("model.safetensors"), tensors);
    folder
}

fn refusal(folder: &Path, replaced: &[&str], ignored: &[&str]) -> String {
    let checked =
        Pretrained::open(folder).and_then(|file| file.check(&layout(1), replaced, ignored));
    checked.unwrap_err().to_string().replace(&format!("{}/", folder.display()), "")
}

#[test]
fn every_type_is_converted_and_each_rank_reads_its_part() {
    for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
        let folder = single(&[("a.weight", dtype, &[3, 5]), ("b.weight", dtype, &[4])]);
        let file = Pretrained::open(folder.path()).unwrap();
        for (world_size, of) in [(1, DType::F32), (2, DType::F64)] {
            let layout = std::sync::Arc::new(layout(world_size));
            file.check(&layout, &[], &[]).unwrap();
            let storage = Storage::private(layout.clone(), of, &Allocator::new()).unwrap();
            storage.initialize(1).unwrap();
            file.load(&storage, &[]).unwrap();
            for (at, len) in [(0, 15), (1, 4)] {
                let value = storage.value(ParamId(at)).unwrap();
                let found: Vec<f32> = match of {
                    DType::F64 => value.read::<f64>().unwrap().iter().map(|x| *x as f32).collect(),
                    _ => value.read::<f32>().unwrap().to_vec(),
                };
                assert_eq!(found, numbers(len), "{dtype:?}");
            }
        }
    }
}

#[test]
fn an_index_names_the_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    write(&path("model-1.safetensors"), &[A]);
    write(&path("model-2.safetensors"), &[B]);
    let index = |map: &str| {
        let text = format!("{{\"metadata\": {{}}, \"weight_map\": {map}}}");
        fs::write(path("model.safetensors.index.json"), text).unwrap();
    };
    index(r#"{"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"}"#);
    Pretrained::open(folder.path()).unwrap().check(&layout(1), &[], &[]).unwrap();

    index(r#"{"a.weight": "model-1.safetensors", "b.weight": "model-1.safetensors"}"#);
    let reason = "model-1.safetensors: there is no tensor b.weight, which model.safetensors.index.json says is here";
    assert_eq!(refusal(folder.path(), &[], &[]), reason);
    index(r#"{"a.weight": "../other.safetensors"}"#);
    let reason = "model.safetensors.index.json: a.weight lies in \"../other.safetensors\", which is no name of a file";
    assert_eq!(refusal(folder.path(), &[], &[]), reason);
    index("3");
    let refused = refusal(folder.path(), &[], &[]);
    assert!(
        refused.starts_with("model.safetensors.index.json: is no index of weights"),
        "{refused}"
    );
    index(r#"{"a.weight": "model-3.safetensors"}"#);
    let refused = refusal(folder.path(), &[], &[]);
    assert!(refused.starts_with("model-3.safetensors: is missing, and"), "{refused}");
}

#[test]
fn names_shapes_and_types_must_be_those_of_the_model() {
    let check = |tensors: &[_], expected: &str| {
        assert_eq!(refusal(single(tensors).path(), &[], &[]), expected);
    };
    let file = "model.safetensors:";
    check(
        &[A, ("b.weight", Dtype::F32, &[5])],
        &format!("{file} b.weight has shape [5], and the model needs [4]"),
    );
    check(&[A, B, ("c", Dtype::F32, &[1])], &format!("{file} the model has no parameter c"));
    check(
        &[A, ("b.weight", Dtype::F64, &[4])],
        &format!("{file} b.weight is of type F64; F32, F16 and BF16 can be read"),
    );
    let folder = single(&[A]);
    let missing = refusal(folder.path(), &[], &[]);
    assert!(missing.ends_with(": there is no tensor b.weight"), "{missing}");
    let file = Pretrained::open(folder.path()).unwrap();
    let new = file.check(&layout(1), &["b.weight"], &["c"]).unwrap();
    assert_eq!(new, [NewParam { name: "b.weight".into(), stored: None }]);
    // What is replaced keeps its initial value.
    let layout = std::sync::Arc::new(layout(1));
    let storage = Storage::private(layout, DType::F32, &Allocator::new()).unwrap();
    storage.initialize(1).unwrap();
    file.load(&storage, &new).unwrap();
    assert_eq!(*storage.value(ParamId(1)).unwrap().read::<f32>().unwrap(), [9.0; 4]);
    assert_eq!(*storage.value(ParamId(0)).unwrap().read::<f32>().unwrap(), *numbers(15));
}

#[test]
fn a_new_parameter_is_not_read_from_a_tensor_of_another_shape_or_type() {
    let load = |tensors: &[_]| {
        let folder = single(tensors);
        let file = Pretrained::open(folder.path()).unwrap();
        let layout = std::sync::Arc::new(layout(1));
        let new = file.check(&layout, &["b.weight"], &[]).unwrap();
        let storage = Storage::private(layout, DType::F32, &Allocator::new()).unwrap();
        storage.initialize(1).unwrap();
        file.load(&storage, &new).unwrap();
        let b = storage.value(ParamId(1)).unwrap().read::<f32>().unwrap().to_vec();
        assert_eq!(*storage.value(ParamId(0)).unwrap().read::<f32>().unwrap(), *numbers(15));
        let stored: Vec<Option<String>> = new.into_iter().map(|new| new.stored).collect();
        (b, stored)
    };
    // With too few elements, the bytes behind the tensor would be those of another one, or none.
    let other = |dtype, shape| [("b.weight", dtype, shape), A];
    let named = |name: &str| vec![Some(name.to_owned())];
    assert_eq!(load(&other(Dtype::F32, &[2])), (vec![9.0; 4], named("[2] of F32")));
    assert_eq!(load(&other(Dtype::F32, &[2, 2])), (vec![9.0; 4], named("[2, 2] of F32")));
    assert_eq!(load(&other(Dtype::F64, &[4])), (vec![9.0; 4], named("[4] of F64")));
    assert_eq!(load(&[A]), (vec![9.0; 4], vec![None]));
    // One that fits is read.
    assert_eq!(load(&[A, B]), (numbers(4), vec![]));
    // Without a check, nothing is read that does not fit.
    let folder = single(&other(Dtype::F32, &[2]));
    let storage = Storage::private(layout(1).into(), DType::F32, &Allocator::new()).unwrap();
    let error = Pretrained::open(folder.path()).unwrap().load(&storage, &[]).unwrap_err();
    assert!(error.to_string().contains("b.weight has shape [2]"), "{error}");
}

#[test]
fn damaged_files_are_named() {
    let folder = single(&[A, B]);
    let path = folder.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let with = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        refusal(folder.path(), &[], &[])
    };
    let cut = with(&whole[..whole.len() - 1]);
    assert!(cut.ends_with("it is truncated or damaged"), "{cut}");
    let longer = with(&[&whole[..], &[0]].concat());
    assert!(longer.ends_with("it is truncated or damaged"), "{longer}");
    let header_only = with(&whole[..40]);
    assert!(header_only.ends_with("it is truncated, or no safetensors file"), "{header_only}");
    let mut changed = whole.clone();
    changed[9] = b'{';
    let changed = with(&changed);
    assert!(changed.contains("its header is damaged"), "{changed}");
    let short = with(&whole[..5]);
    assert!(short.starts_with("model.safetensors: "), "{short}");
    fs::remove_file(&path).unwrap();
    let none = refusal(folder.path(), &[], &[]);
    assert!(
        none.ends_with("there is no model.safetensors and no model.safetensors.index.json"),
        "{none}"
    );
}

/// The rest of such a name would look like a message of its own.
#[test]
fn a_name_with_a_line_end_stays_on_its_line() {
    let evil: (&str, Dtype, &[usize]) = ("c\nerror: forged\t", Dtype::F32, &[1]);
    let folder = single(&[A, B, evil]);
    let refused = refusal(folder.path(), &[], &[]);
    let reason = "the model has no parameter c\\nerror: forged\\t";
    assert_eq!(refused, format!("model.safetensors: {reason}"));
    let inner = folder.path().join("a\nerror: forged");
    let refused = Pretrained::open(&inner).unwrap_err().to_string();
    assert!(refused.contains("a\\nerror: forged: there is no model.safetensors"), "{refused}");
    assert!(!refused.contains('\n'), "{refused}");
}

#[test]
fn tensors_are_compared_by_their_values() {
    let c: (&str, Dtype, &[usize]) = ("c", Dtype::BF16, &[3, 5]);
    let folder = single(&[A, B, c]);
    let file = Pretrained::open(folder.path()).unwrap();
    assert_eq!(file.are_equal("a.weight", "c").unwrap(), Some(true));
    assert_eq!(file.are_equal("a.weight", "b.weight").unwrap(), Some(false));
    assert_eq!(file.are_equal("a.weight", "d").unwrap(), None);
    // The last value of a.
    let path = folder.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.windows(4).rposition(|window| window == 2.0f32.to_le_bytes()).unwrap();
    bytes[at] ^= 1;
    fs::write(&path, bytes).unwrap();
    let file = Pretrained::open(folder.path()).unwrap();
    assert_eq!(file.are_equal("a.weight", "c").unwrap(), Some(false));
}

/// A header of 100 MB would take eleven times as much memory.
#[test]
fn a_header_that_is_too_long_is_refused_before_it_is_read() {
    let folder = single(&[A, B]);
    let path = folder.path().join("model.safetensors");
    let len: u64 = 100_000_000;
    fs::write(&path, len.to_le_bytes()).unwrap();
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(len + 8).unwrap();
    let refused = refusal(folder.path(), &[], &[]);
    let reason =
        "its header has 100 MB, and at most 16 MB are read; divide the model among several files";
    assert_eq!(refused, format!("model.safetensors: {reason}"));
}
