// A techmap for yosys: sums and differences of DSP_ADDER_BITS to 48 bits in a DSP48E1 without registers.
// P = C + A:B or C - A:B. Source: AMD UG479, tables 2-7 to 2-10 (OPMODE), 2-13 (ALUMODE).
(* techmap_celltype = "$add $sub" *)
module dsp_adder (A, B, Y);
	parameter A_SIGNED = 0;
	parameter B_SIGNED = 0;
	parameter A_WIDTH = 1;
	parameter B_WIDTH = 1;
	parameter Y_WIDTH = 1;
	parameter _TECHMAP_CELLTYPE_ = "";
	input [A_WIDTH-1:0] A;
	input [B_WIDTH-1:0] B;
	output [Y_WIDTH-1:0] Y;

	wire _TECHMAP_FAIL_ = Y_WIDTH < `DSP_ADDER_BITS || Y_WIDTH > 48;

	// No bit below depends on those above Y: they stay free, and nothing is routed to them.
	wire [47:0] first, second, result;
	\$pos #(.A_SIGNED(A_SIGNED && B_SIGNED), .A_WIDTH(A_WIDTH), .Y_WIDTH(Y_WIDTH))
		extend_first (.A(A), .Y(first[Y_WIDTH-1:0]));
	\$pos #(.A_SIGNED(A_SIGNED && B_SIGNED), .A_WIDTH(B_WIDTH), .Y_WIDTH(Y_WIDTH))
		extend_second (.A(B), .Y(second[Y_WIDTH-1:0]));
	generate
		if (Y_WIDTH < 48) begin
			assign first[47:Y_WIDTH] = {(48 - Y_WIDTH){1'bx}};
			assign second[47:Y_WIDTH] = {(48 - Y_WIDTH){1'bx}};
		end
	endgenerate
	DSP48E1 #(
		.ACASCREG(0), .ADREG(0), .ALUMODEREG(0), .AREG(0), .BCASCREG(0), .BREG(0), .CARRYINREG(0), .CARRYINSELREG(0),
		.CREG(0), .DREG(0), .INMODEREG(0), .MREG(0), .OPMODEREG(0), .PREG(0), .A_INPUT("DIRECT"), .B_INPUT("DIRECT"),
		.USE_MULT("NONE"), .USE_SIMD("ONE48"), .USE_DPORT("FALSE")
	) _TECHMAP_REPLACE_ (
		.A(second[47:18]), .B(second[17:0]), .C(first), .P(result),
		.OPMODE(7'b0110011), .ALUMODE(_TECHMAP_CELLTYPE_ == "$sub" ? 4'b0011 : 4'b0000),
		.D(25'b0), .CARRYIN(1'b0), .CARRYINSEL(3'b000), .INMODE(5'b00000), .ACIN(30'b0), .BCIN(18'b0), .PCIN(48'b0)
	);
	assign Y = result[Y_WIDTH-1:0];
endmodule
