"""Update commands: ranges, what a build refuses, and status codes."""

from dataclasses import replace

import pytest

from nearflash.abi.errors import AlignmentError, CommandError
from nearflash.abi.formats import BF16, FP16
from nearflash.abi.kernel.commands import AttendCommand, CopyFormat, GradientFormat, Status, UpdateCommand
from nearflash.abi.kernel.config import CONFIGS, update_config
from nearflash.abi.optimizers import AdamStep, LionStep, MasterFormat, SgdStep, StateFormat
from nearflash.abi.registers import DELTA_BIT, SPLIT_BIT, SPLIT_UPDATE, UPDATE
from nearflash.abi.topk import StreamFault

TINY = update_config("update-tiny")


def command(rule=None, params=64, **options):
    """In place at multiples of 0x1000, with a copy at 0x9000 where one is made."""
    rule = rule or AdamStep(1e-3, 1)
    inputs = {name: 0x1000 * (1 + place) for place, name in enumerate(("g", "p", *rule.arrays))}
    outputs = {name: address for name, address in inputs.items() if name != "g"}
    if options.get("copy"):
        outputs["copy"] = 0x9000
    return UpdateCommand(rule, params, inputs, outputs, **options)


def test_codes_of_the_status():
    assert {status.name: int(status) for status in Status} == {
        "OK": 0,
        "READ_ERROR": 1,
        "WRITE_ERROR": 2,
        "MISALIGNED": 3,
        "EMPTY": 4,
        "UNSUPPORTED": 5,
        "STREAM_HEADER": 17,
        "STREAM_LENGTH": 18,
        "STREAM_COUNT": 19,
        "STREAM_CHECKSUM": 20,
        "STREAM_ORDER": 21,
        "STREAM_RANGE": 22,
    }


def test_a_status_names_the_fault_of_its_stream():
    for status in Status:
        assert status.stream_fault.name == status.name.removeprefix("STREAM_") or status < 16
    assert {status.stream_fault for status in Status if status < 16} == {StreamFault.NONE}


def test_codes_of_the_formats():
    assert [(form.name, int(form)) for form in CopyFormat] == [("NONE", 0), ("FP16", 1), ("BF16", 2)]
    assert [form.number_format for form in CopyFormat] == [None, FP16, BF16]
    assert [(form.name, int(form)) for form in GradientFormat] == [("FP32", 0), ("TOPK", 1), ("BF16", 2)]
    assert [(what.name, int(what)) for what in AttendCommand] == [("HEADS", 0), ("PAGES", 1)]


def test_bf16_gradients_have_half_the_bytes():
    assert command(gradient=GradientFormat.BF16).reads()["g"] == (0x1000, 128)


def test_ranges_of_a_dense_step():
    step = command(copy=CopyFormat.BF16)
    assert step.reads() == {"g": (0x1000, 256), "p": (0x2000, 256), "m": (0x3000, 256), "v": (0x4000, 256)}
    assert step.writes() == {"p": (0x2000, 256), "m": (0x3000, 256), "v": (0x4000, 256), "copy": (0x9000, 128)}


def test_a_command_made_from_another_has_ranges_of_its_own():
    """They are computed once, when they are first asked for."""
    first = command()
    before = first.reads()
    longer = replace(first, params=2 * first.params, outputs={**first.outputs, "p": 1 << 20})
    assert longer.reads()["p"] == (before["p"][0], 2 * before["p"][1])
    assert longer.writes()["p"] == (1 << 20, 2 * first.writes()["p"][1])
    assert first.reads() == before and first == command() and hash(first.rule) == hash(command().rule)


def test_a_delta_has_room_for_the_longest_and_is_refused_where_no_build_writes_it():
    step = command(copy=CopyFormat.BF16, delta=True)
    assert step.writes()["copy"] == (0x9000, 32 + 8 + 128)
    step.check(TINY.in_software())
    with pytest.raises(CommandError, match="delta must be False on update-tiny, which writes whole copies, not True"):
        step.check(TINY)
    with pytest.raises(CommandError, match="copy must be FP16 or BF16 for a delta of it, not NONE"):
        command(delta=True).check(TINY.in_software())
    with pytest.raises(CommandError, match="a delta must be below 4 GiB, not of 2147483648 parameters; split"):
        command(copy=CopyFormat.BF16, params=1 << 31, delta=True).check(TINY.in_software())


def test_ranges_of_narrow_state_and_a_stream():
    step = command(AdamStep(1e-3, 1, state_format="mx8"), gradient=GradientFormat.TOPK, gradient_bytes=72)
    assert step.reads() == {
        "g": (0x1000, 72),
        "p": (0x2000, 256),
        "m": (0x3000, 64),
        "m_scale": (0x4000, 2),
        "v": (0x5000, 64),
        "v_scale": (0x6000, 2),
    }
    assert "copy" not in step.writes()


def test_a_rule_without_an_array_has_no_range_of_it():
    assert set(command(LionStep(1e-3, 1)).reads()) == {"g", "p", "m"}
    assert set(command(SgdStep(1e-3, 1)).writes()) == {"p"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"params": 0}, r"params must be between 1 and 2\^32 - 1, not 0"),
        ({"params": 1 << 32}, r"params must be between 1 and 2\^32 - 1, not 4294967296"),
        ({"first_param": -1}, r"first_param must be between 0 and 2\^40 - 1, not -1"),
        ({"first_param": 1 << 40}, r"first_param must be between 0 and 2\^40 - 1, not 1099511627776"),
        ({"inputs": {"g": 0, "p": 0}}, "inputs must be addresses of g, m, p, v, not of g, p"),
        ({"outputs": {"p": 0, "m": 0}}, "outputs must be addresses of m, p, v, not of m, p"),
        ({"copy": CopyFormat.FP16}, "outputs must be addresses of copy, m, p, v, not of m, p, v"),
    ],
)
def test_values_out_of_range(changes, message):
    command().check(TINY)
    with pytest.raises(CommandError, match=message):
        replace(command(), **changes).check(TINY)


@pytest.mark.parametrize("params", [1, (1 << 32) - 1])
def test_the_least_and_the_most_parameters(params):
    command(params=params, first_param=(1 << 40) - 1).check(TINY)


@pytest.mark.parametrize("changes", [{"params": 33}, {"first_param": 16}])
def test_mx8_comes_in_blocks(changes):
    step = command(AdamStep(1e-3, 1, state_format="mx8"))
    step.check(TINY)
    ((name, value),) = changes.items()
    with pytest.raises(CommandError, match=f"{name} must be a multiple of 32 in state format mx8, not {value}"):
        replace(step, **changes).check(TINY)


def test_an_output_for_a_copy_that_is_not_made_is_ignored():
    step = command()
    replace(step, outputs={**step.outputs, "copy": 0x9000}).check(TINY)


@pytest.mark.parametrize(
    ("build", "step", "message"),
    [
        ({"optimizers": ("adam", "sgd")}, LionStep(1e-3, 1), "optimizer must be adam or sgd on update-tiny, not lion"),
        (
            {"state_formats": ("fp32",)},
            AdamStep(1e-3, 1, state_format="bf16"),
            "state_format must be fp32 on.*, not bf16",
        ),
    ],
)
def test_what_a_build_does_not_have(build, step, message):
    with pytest.raises(CommandError, match=message):
        command(step).check(replace(TINY, **build))
    command(step).check(replace(TINY, **build).in_software())


def test_a_build_without_streams():
    with pytest.raises(CommandError, match="gradient must be fp32 on update-tiny, not topk"):
        command(gradient=GradientFormat.TOPK, gradient_bytes=40).check(replace(TINY, gradients=("fp32",)))


@pytest.mark.parametrize("name", ["attend-tiny", "expand-tiny"])
def test_another_kernel(name):
    with pytest.raises(CommandError, match=f"an update must go to an update kernel, not to {name}"):
        command().check(CONFIGS[name])


@pytest.mark.parametrize(
    ("form", "array", "multiple"),
    [
        (StateFormat.FP32, "g", 8),
        (StateFormat.FP32, "p", 8),
        (StateFormat.FP32, "m", 8),
        (StateFormat.BF16, "p", 8),
        (StateFormat.BF16, "m", 4),
        (StateFormat.MX8, "v", 2),
        (StateFormat.MX8, "v_scale", 1),
    ],
)
def test_alignment_by_what_a_port_takes_at_once(form, array, multiple):
    """Ports of 8 bytes: two parameters."""
    step = command(AdamStep(1e-3, 1, state_format=form))

    def moved(by):
        return replace(step, inputs={**step.inputs, array: step.inputs[array] + by})

    moved(multiple).check(TINY)
    if multiple > 1:
        text = f"{array} read address must be a multiple of {multiple} bytes, not {step.inputs[array] + 1:#x}"
        with pytest.raises(AlignmentError, match=text):
            moved(1).check(TINY)


def test_alignment_of_what_is_written():
    step = command(copy=CopyFormat.FP16)
    with pytest.raises(AlignmentError, match="copy write address must be a multiple of 8 bytes, not 0x9004"):
        replace(step, outputs={**step.outputs, "copy": 0x9004}).check(TINY)


def test_the_program_names_copy_and_gradient():
    values = command(copy=CopyFormat.BF16, gradient=GradientFormat.TOPK, gradient_bytes=4096).registers()
    program = UPDATE["program"].unpack(values["program"])
    assert (program["copy_format"], program["topk"], program["state_format"]) == (2, 1, 0)
    assert (values["gradient_bytes"], values["params"], values["copy_out_address"]) == (4096, 64, 0x9000)
    assert command().registers()["copy_out_address"] == 0


def test_the_deltas_bit_is_none_of_the_maps():
    """Builds without have the register as it was; those with read this bit, too."""
    fields = UPDATE["program"].fields
    assert all(field.lsb + field.width <= DELTA_BIT for field in fields)
    plain, asked = (command(copy=CopyFormat.BF16, delta=delta).registers()["program"] for delta in (False, True))
    assert asked == plain | 1 << DELTA_BIT and plain < 1 << DELTA_BIT


def split_command(**more):
    """Halves of masters where `command` has p."""
    one = command(master=MasterFormat.SPLIT, **more)
    halves = {"weight": 0x20_0000, "rest": 0x30_0004}
    return replace(
        one,
        inputs={name: address for name, address in one.inputs.items() if name != "p"} | halves,
        outputs={name: address for name, address in one.outputs.items() if name != "p"}
        | {name: address + 0x8000 for name, address in halves.items()},
    )


def test_a_split_masters_weights_have_the_registers_of_p_and_its_rests_their_own():
    """And a bit that no field of the map has."""
    one = split_command()
    one.check(update_config("update-tiny-split"))
    values, plain = one.registers(), command().registers()
    assert (values["p_address"], values["p_out_address"]) == (0x20_0000, 0x20_8000)
    assert (values["rest_address"], values["rest_out_address"]) == (0x30_0004, 0x30_8004)
    assert values["program"] == plain["program"] | 1 << SPLIT_BIT
    assert set(values) - set(plain) == {"rest_address", "rest_out_address"}
    assert {r.name for r in SPLIT_UPDATE} - {r.name for r in UPDATE} >= set(values) - set(plain)


def test_a_split_master_is_refused_where_the_build_has_none_and_beside_a_copy():
    with pytest.raises(CommandError, match="master must be fp32 on update-tiny, not split"):
        split_command().check(TINY)
    build = update_config("update-tiny-split")
    with pytest.raises(CommandError, match="copy of a split master must be NONE, as its weight is one, not BF16"):
        split_command(copy=CopyFormat.BF16).check(build)
    moved = replace(split_command(), inputs=split_command().inputs | {"rest": 0x30_0002})
    with pytest.raises(AlignmentError, match="rest read address must be a multiple of 4 bytes, not 0x300002"):
        moved.check(build)
